"""The `batchgen` program: parse, dispatch to one file a command, end with one exit code."""

from __future__ import annotations

import sys
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.main import get_command

from batchgen import __version__
from batchgen.cli_answers import deliver, report_bug, report_error
from batchgen.cli_arguments import (
    AsJson,
    Call,
    JobPath,
    OutputPath,
    Overrides,
    Wait,
    WaitLock,
    json_option,
    seconds_to_wait,
)
from batchgen.collection import collection_paused, exempt_from_collection
from batchgen.ending import ends_at_once
from batchgen.errors import BatchgenError, ExitCode
from batchgen.signals import ASK_AGAIN, end_at_signals, interruptible
from batchgen.surroundings import check_working_directory, open_standard_streams

app = typer.Typer(
    name="batchgen",
    help="Offline batch inference for language models: prompts in, Parquet out, every row back.",
    epilog="Exit codes: 0 done; 1 a bug; 2 job, inputs or model wrong; 3 too many row errors; 4 output locked; "
    "5 output of another job; 6 output damaged; 74 I/O, mend and run again; 75 interrupted, run again.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _load(module: str) -> Any:
    """A module of ours, only when a command needs it: --help reads no pydantic, and validate no torch."""
    with collection_paused():
        found = import_module(f"batchgen.{module}")
        exempt_from_collection()
    return found


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


@app.command()
def init(
    inputs: Annotated[list[Path], typer.Argument(metavar="DATA", help="Files, patterns or directories of rows.")],
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="A Hugging Face id, a directory, or a GGUF file.")
    ] = "HuggingFaceTB/SmolLM2-135M-Instruct",
    job: Annotated[Path, typer.Option("--job", metavar="FILE", help="The job file to write.")] = Path("job.yaml"),
    as_json: AsJson = False,
) -> None:
    """Write a commented job file for some data: its columns are read, the rest is to be edited."""
    with interruptible(ASK_AGAIN):
        _load("commands.init").init(inputs, model=model, job=job, as_json=as_json)


@app.command()
def run(
    job: JobPath,
    overrides: Overrides = None,
    wait: Wait = "0s",
    wait_lock: WaitLock = False,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Begin anew where the output belongs to another job or is damaged; what it holds is removed.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run a job, or go on where it ended. Rows that are committed are not computed again."""
    seconds = seconds_to_wait(wait, wait_lock)
    with interruptible():
        config = _load("config").load_job(job, overrides or [])
        _load("commands.run").run(config, wait_seconds=seconds, overwrite=overwrite, as_json=as_json)


@app.command()
def plan(
    job: JobPath,
    overrides: Overrides = None,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Load the model to measure it, if that was not done before.")
    ] = True,
    again: Annotated[bool, typer.Option("--again", help="Measure even so.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what a job will take: rows, prompt lengths, shared prefixes, memory, time; and what to change."""
    with interruptible(ASK_AGAIN):
        config = _load("config").load_job(job, overrides or [])
        _load("commands.plan").plan(config, measure=measure, again=again, as_json=as_json)


@app.command()
def status(
    output: OutputPath,
    as_json: AsJson = False,
) -> None:
    """Show how far an output is: rows done, errors by code, rate, and who works on it."""
    with interruptible(ASK_AGAIN):
        _load("commands.status").status(output, as_json=as_json)


@app.command()
def watch(
    output: OutputPath,
    interval: Annotated[float, typer.Option(metavar="SECONDS", min=0.2, help="How often to look.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    prometheus: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a Prometheus text file at each look, such as out.prom.")
    ] = None,
    as_json: Annotated[bool, json_option("Print a line of JSON at each look.")] = False,
) -> None:
    """Watch a run in the terminal, also one on another machine: everything is read from the output's files."""
    with interruptible(ASK_AGAIN):
        _load("commands.watch").watch(output, interval=interval, once=once, as_json=as_json, prometheus=prometheus)


@app.command()
def report(
    output: OutputPath,
    to: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it here, not to _batchgen/report.html of the output.")
    ] = None,
    as_json: Annotated[bool, json_option("Print the figures as JSON; write no page.")] = False,
) -> None:
    """Write one HTML page about an output: charts over time, lengths, errors with examples, rows to read."""
    with interruptible(ASK_AGAIN):
        _load("commands.report").report(output, to=to, as_json=as_json)


@app.command()
def inspect(
    output: OutputPath,
    count: Annotated[int, typer.Option("-n", "--rows", min=1, help="How many rows to show.")] = 10,
    ids: Annotated[
        list[str] | None,
        typer.Option(
            "--id",
            metavar="SOURCE:ROW",
            help="Show this row whole; or ROW of source 0, or its id_column.",
        ),
    ] = None,
    status: Annotated[str | None, typer.Option(metavar="ok|error", help="Only rows with this status.")] = None,
    where: Annotated[
        str | None, typer.Option(metavar="EXPRESSION", help="Only rows for which a Jinja expression is true.")
    ] = None,
    at_random: Annotated[bool, typer.Option("--random", help="Draw the rows at random.")] = False,
    seed: Annotated[int, typer.Option(help="Another seed draws other rows.")] = 0,
    as_json: Annotated[bool, json_option("Print whole rows, a line of JSON each.")] = False,
) -> None:
    """Look at committed rows: the first ones, at random, by id, by status or by an expression."""
    if status not in (None, "ok", "error"):
        raise typer.BadParameter(f'must be ok or error, got "{status}"', param_hint="--status")
    with interruptible(ASK_AGAIN):
        module = _load("commands.inspect")
        choice = module.Choice(count, ids or [], status, where, seed if at_random else None)
        module.inspect(output, choice, as_json=as_json)


class ConvertForm(StrEnum):
    """What `convert` writes."""

    JSONL = "jsonl"
    CHAT = "chat"
    OPENAI_BATCH = "openai-batch"


@app.command()
def convert(
    output: OutputPath,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write; - for stdout.")],
    to: Annotated[
        ConvertForm, typer.Option("--to", help="jsonl: whole rows; chat: messages to train on; openai-batch: answers.")
    ],
    errors: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Where error rows of openai-batch go, if not to FILE with .errors before its suffix."
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that are there.")] = False,
    as_json: Annotated[bool, json_option("Print as JSON what was written.")] = False,
) -> None:
    """Write an output as JSON lines, chats or OpenAI's answers."""
    if as_json and str(file) == "-":
        raise typer.BadParameter("stdout holds the lines already; leave it out, or name a file", param_hint="--json")
    if errors is not None and (to is not ConvertForm.OPENAI_BATCH or str(file) == "-"):
        raise typer.BadParameter("goes with --to openai-batch and a file", param_hint="--errors")
    with interruptible(ASK_AGAIN):
        _load("commands.convert").convert(output, file, to.value, errors=errors, overwrite=overwrite, as_json=as_json)


@app.command()
def verify(
    output: OutputPath,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Make damaged and missing files anew; what is damaged is kept in orphans/."),
    ] = False,
    overrides: Overrides = None,
    wait: Wait = "0s",
    wait_lock: WaitLock = False,
    as_json: AsJson = False,
) -> None:
    """Check every file of an output against its record. Exit code 6 where one is not what was committed."""
    seconds = seconds_to_wait(wait, wait_lock)
    with interruptible():
        if repair:
            _load("commands.redo").repair(output, overrides or [], wait_seconds=seconds, as_json=as_json)
        else:
            _load("commands.verify").verify(output, as_json=as_json)


@app.command()
def rerun(
    output: OutputPath,
    where: Annotated[
        str,
        typer.Option(
            metavar="EXPRESSION",
            help="Jinja expression over the columns of a row, such as \"batchgen.status == 'error'\".",
        ),
    ],
    overrides: Overrides = None,
    wait: Wait = "0s",
    wait_lock: WaitLock = False,
    as_json: AsJson = False,
) -> None:
    """Generate committed rows anew, those for which an expression is true; all others stay as they are."""
    seconds = seconds_to_wait(wait, wait_lock)
    with interruptible():
        _load("commands.redo").rerun(output, where, overrides or [], wait_seconds=seconds, as_json=as_json)


@app.command()
def worker(
    scheduler: Annotated[
        str, typer.Option(metavar="ADDRESS", help="The scheduler, such as tls://head:8786, or its scheduler file.")
    ],
    workers: Annotated[
        str, typer.Option(metavar="N", help="How many; auto: one for each GPU, or for each NUMA node of a CPU.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda; as in the jobs that will come.")] = "auto",
    tls_ca_file: Annotated[
        Path | None, typer.Option(help="Certificate of the authority that signed the others.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate of this side.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key of the certificate.")] = None,
) -> None:
    """Work for the jobs of a dask cluster until SIGTERM, which hands unfinished rows back."""
    with interruptible():
        _load("commands.worker").worker(
            scheduler, workers=workers, device=device, ca_file=tls_ca_file, cert=tls_cert, key=tls_key
        )


@app.command()
def validate(
    jobs: Annotated[list[Path], typer.Argument(metavar="JOB", help="One job file or more.")],
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Check job files. All problems are shown at once; neither data nor a model is loaded."""
    with interruptible(ASK_AGAIN):
        _load("commands.validate").validate(jobs, overrides or [], as_json=as_json)


@app.command()
def preview(
    job: JobPath,
    num_rows: Annotated[int, typer.Option("-n", "--rows", min=1, help="How many rows to show.")] = 3,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Print the first prompts with their control tokens and token counts. No weights are loaded."""
    with interruptible(ASK_AGAIN):
        config = _load("config").load_job(job, overrides or [])
        _load("commands.preview").preview(config, num_rows=num_rows, as_json=as_json)


@app.command()
def schema() -> None:
    """Print the JSON schema of the job file, for editors."""
    _load("commands.schema").schema()


def _command(call: Call) -> None:
    try:
        try:
            # The command itself and not `app()`, which would put typer's own hook in place of ours.
            get_command(app).main(prog_name="batchgen", obj=call)
        except SystemExit as end:
            # No command ends with 1: so typer ends where standard output is a pipe that nobody reads any further.
            if end.code == 1:
                raise BrokenPipeError from end
            raise
        finally:
            deliver()
    except BrokenPipeError:
        # As with `| head`: whoever closed it knows.
        sys.exit(ExitCode.IO_ERROR)
    except OSError:
        with _load("pipeline.machine_errors").machine_errors():
            raise


def main() -> None:
    """Run the command line in `sys.argv`; SystemExit has the exit code."""
    sys.excepthook = report_bug
    call = Call()
    try:
        check_working_directory()
        _command(call)
    except BatchgenError as error:
        report_error(error, call.as_json)
        sys.exit(error.exit_code)


def program() -> None:
    """`main` for a process that does nothing else."""
    open_standard_streams()
    end_at_signals()
    with ends_at_once():
        main()


if __name__ == "__main__":
    program()
