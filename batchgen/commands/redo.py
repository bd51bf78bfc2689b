"""`batchgen rerun` and `batchgen verify --repair`: committed rows made anew, with a bar and a summary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from batchgen.commands.progress import open_progress
from batchgen.commands.summary import row_lines, summary_lines
from batchgen.commands.verify import verify
from batchgen.config import JobConfig
from batchgen.data.files import OutputFiles
from batchgen.pipeline.progress import Progress
from batchgen.pipeline.redo import repair as repair_output
from batchgen.pipeline.redo import rerun as rerun_output
from batchgen.pipeline.report import JobReport
from batchgen.pipeline.session import OpenOptions
from batchgen.pipeline.stored import stored_job


def rerun(output: Path, where: str, overrides: Sequence[str], *, wait_seconds: float) -> None:
    """Generate the chosen rows anew and print the summary; its errors are BatchgenErrors with the exit code."""
    job = stored_job(OutputFiles(), output, list(overrides))
    options = OpenOptions(wait_seconds)
    _watched(job, lambda progress: rerun_output(job, where, progress=progress, options=options))


def repair(output: Path, overrides: Sequence[str], *, wait_seconds: float) -> None:
    """Make anew what is damaged, print the summary, and verify the output."""
    job = stored_job(OutputFiles(), output, list(overrides))
    options = OpenOptions(wait_seconds)
    _watched(job, lambda progress: repair_output(job, progress=progress, options=options))
    verify(output)


def _watched(job: JobConfig, work: Callable[[Progress], JobReport]) -> None:
    progress = open_progress()
    try:
        report = work(progress)
    finally:
        progress.close()
    for line in summary_lines(report):
        print(line)
    if report.num_rows_this_run > 0:
        for line in row_lines(report, job.output):
            print(line)
