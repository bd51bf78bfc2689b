"""The `batchgen` program: parse, dispatch to one file a command, end with one exit code."""

from __future__ import annotations

import sys
import traceback
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import typer
from typer.main import get_command

from batchgen import __version__
from batchgen.commands import schema as schema_command
from batchgen.commands import validate as validate_command
from batchgen.config import load_job
from batchgen.errors import BatchgenError, Interrupted, JobFileError
from batchgen.units import parse_duration

app = typer.Typer(
    name="batchgen",
    help="Offline batch inference for language models: prompts in, Parquet out, every row back.",
    epilog="Exit codes: 0 done; 1 a bug; 2 job, inputs or model wrong; 3 too many row errors; 4 output locked; "
    "5 output of another job; 6 output damaged; 74 I/O, mend and run again; 75 interrupted, run again.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

JobPath = Annotated[Path, typer.Argument(metavar="JOB", help="The job file, such as jobs/quickstart.yaml.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Set one key of the job, such as sampling.temperature=0.5; the value is YAML. Can be repeated.",
    ),
]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"batchgen {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def _seconds(text: str) -> float:
    try:
        return float(text) if text.isdigit() else parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--wait") from error


@app.command()
def run(
    job: JobPath,
    overrides: Overrides = None,
    wait: Annotated[
        str,
        typer.Option(metavar="TIME", help="Wait this long for another run to let go of the output, such as 10m."),
    ] = "0s",
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Begin anew where the output belongs to another job or is damaged; what it holds is removed.",
        ),
    ] = False,
) -> None:
    """Run a job, or go on where it ended. Rows that are committed are not computed again."""
    wait_seconds = _seconds(wait)
    config = load_job(job, overrides or [])
    try:
        # Loaded here and not above: torch takes seconds, which a wrong job file, --help and validate must not.
        command: Any = import_module("batchgen.commands.run")
        command.run(config, wait_seconds=wait_seconds, overwrite=overwrite)
    except KeyboardInterrupt as interrupt:
        raise Interrupted("interrupted; the same command goes on where it ended") from interrupt


@app.command()
def validate(
    jobs: Annotated[list[Path], typer.Argument(metavar="JOB", help="One job file or more.")],
    overrides: Overrides = None,
) -> None:
    """Check job files. All problems are shown at once; neither data nor a model is loaded."""
    validate_command.validate(jobs, overrides or [])


@app.command()
def schema() -> None:
    """Print the JSON schema of the job file, for editors."""
    schema_command.schema()


def _report_bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    traceback.print_exception(kind, error, trace)
    print(
        f"batchgen {__version__}: this is a bug. Please report it with the lines above and the job file; "
        "rows that were committed are safe.",
        file=sys.stderr,
    )


def main() -> None:
    """Run the command line in `sys.argv` and exit the process."""
    # Any error but ours is a bug. The interpreter ends with code 1 by itself, we only add what to do.
    sys.excepthook = _report_bug
    try:
        # The command itself and not `app()`, which would put typer's own hook in place of ours.
        get_command(app).main(prog_name="batchgen")
    except BatchgenError as error:
        print(error if isinstance(error, JobFileError) else f"batchgen: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
