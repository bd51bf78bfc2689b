"""What `run`, `rerun` and `verify --repair` have in common: a bar while they work, then a report and a summary."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from batchgen.commands.progress import open_progress
from batchgen.commands.report import write_report
from batchgen.commands.summary import relative, row_lines, summary_lines
from batchgen.config import JobConfig
from batchgen.data.files import OutputFiles
from batchgen.errors import BatchgenError, TooManyRowErrors
from batchgen.pipeline.progress import Progress
from batchgen.pipeline.report import JobReport
from batchgen.pipeline.stored import read_output


def finish(job: JobConfig, work: Callable[[Progress], JobReport]) -> None:
    """Do the work with a bar, write the report of what came out, and print the summary and a few rows.

    The report is written where too many rows failed, too; after an interruption it is left to `batchgen report`.
    """
    progress = open_progress(job.run.log)
    try:
        found = work(progress)
    except TooManyRowErrors:
        _write_report(job)
        raise
    finally:
        progress.close()
    for line in summary_lines(found):
        print(line)
    if found.num_rows_this_run > 0:
        _write_report(job)
        for line in row_lines(found, job.output):
            print(line)


def _write_report(job: JobConfig) -> None:
    # The rows are safe by now: what is wrong with the page must not make the run look failed.
    if job.run.report:
        with suppress(BatchgenError):
            print(f"  report     {relative(write_report(read_output(OutputFiles(), job.output_dir)))}")
