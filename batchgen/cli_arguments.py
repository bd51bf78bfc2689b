"""The arguments that several commands of the `batchgen` program share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from batchgen.units import parse_duration

JobPath = Annotated[Path, typer.Argument(metavar="JOB", help="The job file, such as jobs/quickstart.yaml.")]
OutputPath = Annotated[Path, typer.Argument(metavar="OUT", help="The directory of an output, a job's output.path.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Set one key of the job, such as sampling.temperature=0.5; the value is YAML. Can be repeated.",
    ),
]
Wait = Annotated[
    str, typer.Option(metavar="TIME", help="Wait this long for another run to let go of the output, such as 10m.")
]
WaitLock = Annotated[
    bool, typer.Option("--wait-lock", help="Wait for another run to let go of the output, however long it takes.")
]


def seconds_to_wait(wait: str, wait_lock: bool) -> float:
    """What `--wait` and `--wait-lock` come to; raises BadParameter for what is no time."""
    if wait_lock:
        return math.inf
    try:
        return float(wait) if wait.isdigit() else parse_duration(wait)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--wait") from error


@dataclass
class Call:
    """What the program must know of the command that it called."""

    as_json: bool = False
    """An error is then a document on stdout, too."""


def _note_json(context: typer.Context, wanted: bool) -> bool:
    context.ensure_object(Call).as_json = wanted
    return wanted


def json_option(help_text: str) -> Any:
    """`--json` of one command, for Annotated; the context's Call then says whether it was given."""
    return typer.Option("--json", callback=_note_json, help=help_text)


AsJson = Annotated[bool, json_option("Print the result as JSON.")]
