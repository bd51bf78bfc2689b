"""`batchgen run`: the job with a bar, and its summary."""

from __future__ import annotations

from batchgen.commands.progress import open_progress
from batchgen.commands.summary import row_lines, summary_lines
from batchgen.config import JobConfig
from batchgen.pipeline.runner import run_job
from batchgen.pipeline.session import OpenOptions


def run(job: JobConfig, *, wait_seconds: float, overwrite: bool) -> None:
    """Run the job to its end; its errors are BatchgenErrors with the exit code, progress goes to stderr."""
    progress = open_progress()
    try:
        report = run_job(job, progress=progress, options=OpenOptions(wait_seconds, overwrite))
    finally:
        progress.close()
    for line in summary_lines(report):
        print(line)
    if report.num_rows_this_run > 0:
        for line in row_lines(report, job.output):
            print(line)
