"""`batchgen rerun` and `batchgen verify --repair`: committed rows made anew, with a bar and a summary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from batchgen.commands.finish import document, finish, work_and_report
from batchgen.commands.verify import verify
from batchgen.data.files import OutputFiles
from batchgen.pipeline.progress import Progress
from batchgen.pipeline.redo import repair as repair_output
from batchgen.pipeline.redo import rerun as rerun_output
from batchgen.pipeline.report import JobReport
from batchgen.pipeline.session import OpenOptions
from batchgen.pipeline.stored import stored_job


def rerun(output: Path, where: str, overrides: Sequence[str], *, wait_seconds: float, as_json: bool = False) -> None:
    """Generate the chosen rows anew and print the summary; its errors are BatchgenErrors with the exit code."""
    job = stored_job(OutputFiles(), output, list(overrides))
    options = OpenOptions(wait_seconds)
    finish(job, lambda progress: rerun_output(job, where, progress=progress, options=options), as_json=as_json)


def repair(output: Path, overrides: Sequence[str], *, wait_seconds: float, as_json: bool = False) -> None:
    """Make anew what is damaged, print the summary, and verify the output."""
    job = stored_job(OutputFiles(), output, list(overrides))
    options = OpenOptions(wait_seconds)

    def work(progress: Progress) -> JobReport:
        return repair_output(job, progress=progress, options=options)

    if as_json:
        verify(output, as_json=True, repair=document(*work_and_report(job, work)))
    else:
        finish(job, work)
        verify(output)
