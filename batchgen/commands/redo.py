"""`batchgen rerun` and `batchgen verify --repair`: committed rows made anew, with a bar and a summary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from batchgen.commands.finish import finish
from batchgen.commands.verify import verify
from batchgen.data.files import OutputFiles
from batchgen.pipeline.redo import repair as repair_output
from batchgen.pipeline.redo import rerun as rerun_output
from batchgen.pipeline.session import OpenOptions
from batchgen.pipeline.stored import stored_job


def rerun(output: Path, where: str, overrides: Sequence[str], *, wait_seconds: float) -> None:
    """Generate the chosen rows anew and print the summary; its errors are BatchgenErrors with the exit code."""
    job = stored_job(OutputFiles(), output, list(overrides))
    options = OpenOptions(wait_seconds)
    finish(job, lambda progress: rerun_output(job, where, progress=progress, options=options))


def repair(output: Path, overrides: Sequence[str], *, wait_seconds: float) -> None:
    """Make anew what is damaged, print the summary, and verify the output."""
    job = stored_job(OutputFiles(), output, list(overrides))
    options = OpenOptions(wait_seconds)
    finish(job, lambda progress: repair_output(job, progress=progress, options=options))
    verify(output)
