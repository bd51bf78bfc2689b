"""What `run`, `rerun` and `verify --repair` have in common: a bar while they work, then a report and a summary."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from batchgen.commands.document import print_document
from batchgen.commands.progress import open_progress
from batchgen.commands.report import write_report
from batchgen.commands.summary import relative, row_lines, summary_lines
from batchgen.config import JobConfig
from batchgen.data.files import OutputFiles
from batchgen.data.without_pandas import leave_pandas_out
from batchgen.errors import BatchgenError, TooManyRowErrors
from batchgen.pipeline.progress import Progress
from batchgen.pipeline.report import JobReport
from batchgen.pipeline.stored import read_output


def finish(job: JobConfig, work: Callable[[Progress], JobReport], *, as_json: bool = False) -> None:
    """Do the work with a bar, write the report of what came out, and print the summary and a few rows."""
    found, page = work_and_report(job, work)
    if as_json:
        print_document(document(found, page))
        return
    for line in summary_lines(found):
        print(line)
    if page is not None:
        print(report_line(page))
    if found.num_rows_this_run > 0:
        for line in row_lines(found, job.output):
            print(line)


def work_and_report(job: JobConfig, work: Callable[[Progress], JobReport]) -> tuple[JobReport, Path | None]:
    """Do the work with a bar; returns what came out, and the page about it where one was written.

    The page is written where too many rows failed, too; after an interruption it is left to `batchgen report`.
    """
    leave_pandas_out()
    progress = open_progress(job.run.log)
    try:
        found = work(progress)
    except TooManyRowErrors as error:
        page = _write_report(job)
        if page is not None:
            error.result = {"report": str(page)}
            progress.message(report_line(page))
        raise
    finally:
        progress.close()
    return found, _write_report(job) if found.num_rows_this_run > 0 else None


def document(found: JobReport, page: Path | None) -> dict[str, Any]:
    """What `--json` prints of a run."""
    return {**found.to_json(), "report": None if page is None else str(page)}


def report_line(page: Path) -> str:
    """Where the page lies, as a line of the summary."""
    return f"  report     {relative(page)}"


def _write_report(job: JobConfig) -> Path | None:
    # The rows are safe by now: what is wrong with the page must not make the run look failed.
    if job.run.report:
        with suppress(BatchgenError):
            return write_report(read_output(OutputFiles(), job.output_dir))
    return None
