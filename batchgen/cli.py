"""The `batchgen` program: parse, dispatch to one file a command, end with one exit code."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, TextIO

import typer
from typer.main import get_command

from batchgen import __version__
from batchgen.collection import collection_paused, exempt_from_collection
from batchgen.ending import ends_at_once
from batchgen.errors import BatchgenError, ExitCode, Interrupted, JobFileError
from batchgen.printable import printable_lines
from batchgen.signals import watched_signals
from batchgen.units import parse_duration

app = typer.Typer(
    name="batchgen",
    help="Offline batch inference for language models: prompts in, Parquet out, every row back.",
    epilog="Exit codes: 0 done; 1 a bug; 2 job, inputs or model wrong; 3 too many row errors; 4 output locked; "
    "5 output of another job; 6 output damaged; 74 I/O, mend and run again; 75 interrupted, run again.",
    no_args_is_help=True,
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


@dataclass
class Call:
    """What `main` must know of the command that it called."""

    as_json: bool = False
    """An error is then a document on stdout, too."""


def _note_json(context: typer.Context, wanted: bool) -> bool:
    context.ensure_object(Call).as_json = wanted
    return wanted


def _json_option(help_text: str) -> Any:
    return typer.Option("--json", callback=_note_json, help=help_text)


AsJson = Annotated[bool, _json_option("Print the result as JSON.")]


class ConvertForm(StrEnum):
    """What `convert` writes."""

    JSONL = "jsonl"
    CHAT = "chat"
    OPENAI_BATCH = "openai-batch"


OutputPath = Annotated[Path, typer.Argument(metavar="OUT", help="The directory of an output, a job's output.path.")]
Wait = Annotated[
    str, typer.Option(metavar="TIME", help="Wait this long for another run to let go of the output, such as 10m.")
]
WaitLock = Annotated[
    bool, typer.Option("--wait-lock", help="Wait for another run to let go of the output, however long it takes.")
]


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


@contextmanager
def _interruptible() -> Iterator[None]:
    """What signals mean before and after the runner watches them itself: nothing is lost, exit code 75."""
    for number in watched_signals():
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise Interrupted("interrupted; the same command goes on where it ended") from interrupt


def _wait_seconds(text: str, wait_lock: bool) -> float:
    if wait_lock:
        return math.inf
    try:
        return float(text) if text.isdigit() else parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--wait") from error


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
    wait_seconds = _wait_seconds(wait, wait_lock)
    with _interruptible():
        config = _load("config").load_job(job, overrides or [])
        _load("commands.run").run(config, wait_seconds=wait_seconds, overwrite=overwrite, as_json=as_json)


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
    config = _load("config").load_job(job, overrides or [])
    with _interruptible():
        _load("commands.plan").plan(config, measure=measure, again=again, as_json=as_json)


@app.command()
def status(
    output: OutputPath,
    as_json: AsJson = False,
) -> None:
    """Show how far an output is: rows done, errors by code, rate, and who works on it."""
    _load("commands.status").status(output, as_json=as_json)


@app.command()
def watch(
    output: OutputPath,
    interval: Annotated[float, typer.Option(metavar="SECONDS", min=0.2, help="How often to look.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    prometheus: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a Prometheus text file at each look, such as out.prom.")
    ] = None,
    as_json: Annotated[bool, _json_option("Print a line of JSON at each look.")] = False,
) -> None:
    """Watch a run in the terminal, also one on another machine: everything is read from the output's files."""
    _load("commands.watch").watch(output, interval=interval, once=once, as_json=as_json, prometheus=prometheus)


@app.command()
def report(
    output: OutputPath,
    to: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it here, not to _batchgen/report.html of the output.")
    ] = None,
    as_json: Annotated[bool, _json_option("Print the figures as JSON; write no page.")] = False,
) -> None:
    """Write one HTML page about an output: charts over time, lengths, errors with examples, rows to read."""
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
    as_json: Annotated[bool, _json_option("Print whole rows, a line of JSON each.")] = False,
) -> None:
    """Look at committed rows: the first ones, at random, by id, by status or by an expression."""
    if status not in (None, "ok", "error"):
        raise typer.BadParameter(f'must be ok or error, got "{status}"', param_hint="--status")
    module = _load("commands.inspect")
    choice = module.Choice(count, ids or [], status, where, seed if at_random else None)
    module.inspect(output, choice, as_json=as_json)


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
    as_json: Annotated[bool, _json_option("Print as JSON what was written.")] = False,
) -> None:
    """Write an output as JSON lines, chats or OpenAI's answers."""
    if as_json and str(file) == "-":
        raise typer.BadParameter("stdout holds the lines already; leave it out, or name a file", param_hint="--json")
    if errors is not None and (to is not ConvertForm.OPENAI_BATCH or str(file) == "-"):
        raise typer.BadParameter("goes with --to openai-batch and a file", param_hint="--errors")
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
    wait_seconds = _wait_seconds(wait, wait_lock)
    with _interruptible():
        if repair:
            _load("commands.redo").repair(output, overrides or [], wait_seconds=wait_seconds, as_json=as_json)
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
    wait_seconds = _wait_seconds(wait, wait_lock)
    with _interruptible():
        _load("commands.redo").rerun(output, where, overrides or [], wait_seconds=wait_seconds, as_json=as_json)


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
    with _interruptible():
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
    _load("commands.validate").validate(jobs, overrides or [], as_json=as_json)


@app.command()
def preview(
    job: JobPath,
    num_rows: Annotated[int, typer.Option("-n", "--rows", min=1, help="How many rows to show.")] = 3,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Print the first prompts with their control tokens and token counts. No weights are loaded."""
    config = _load("config").load_job(job, overrides or [])
    with _interruptible():
        _load("commands.preview").preview(config, num_rows=num_rows, as_json=as_json)


@app.command()
def schema() -> None:
    """Print the JSON schema of the job file, for editors."""
    _load("commands.schema").schema()


def _report_bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    traceback.print_exception(kind, error, trace)
    print(
        f"batchgen {__version__}: this is a bug. Please report it with the lines above and the job file; "
        "rows that were committed are safe.",
        file=sys.stderr,
    )


def _say(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    """Drop what a stream cannot take: the interpreter would try again at its end, and exit with a code of its own."""
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), stream.fileno())


def _deliver() -> None:
    """See to it that what was printed has arrived, wherever it goes; raises OSError."""
    try:
        print(end="", flush=True)
    except OSError:
        _discard(sys.stdout)
        raise


def _answer(error: BatchgenError) -> None:
    """The error for `--json`, with what was found all the same, in one line: some commands print lines."""
    try:
        print(json.dumps({**error.result, "error": error.to_json()}), flush=True)
    except OSError:
        _discard(sys.stdout)


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
            _deliver()
    except BrokenPipeError:
        # As with `| head`: whoever closed it knows.
        sys.exit(ExitCode.IO_ERROR)
    except OSError:
        with _load("pipeline.machine_errors").machine_errors():
            raise


def main() -> None:
    """Run the command line in `sys.argv`; SystemExit has the exit code."""
    # Any error but ours is a bug. The interpreter ends with code 1 by itself, we only add what to do.
    sys.excepthook = _report_bug
    call = Call()
    try:
        _command(call)
    except BatchgenError as error:
        if call.as_json:
            _answer(error)
        # A message may quote names and rows of others.
        message = printable_lines(str(error))
        _say(message if isinstance(error, JobFileError) else f"batchgen: {message}")
        sys.exit(error.exit_code)


def program() -> None:
    """`main` for a process that does nothing else."""
    with ends_at_once():
        main()


if __name__ == "__main__":
    program()
