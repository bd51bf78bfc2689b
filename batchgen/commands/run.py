"""`batchgen run`: the job with a bar, its report, and its summary."""

from __future__ import annotations

from batchgen.commands.finish import finish
from batchgen.config import JobConfig
from batchgen.pipeline.runner import run_job
from batchgen.pipeline.session import OpenOptions


def run(job: JobConfig, *, wait_seconds: float, overwrite: bool, as_json: bool = False) -> None:
    """Run the job to its end; its errors are BatchgenErrors with the exit code, progress goes to stderr."""
    options = OpenOptions(wait_seconds, overwrite)
    finish(job, lambda progress: run_job(job, progress=progress, options=options), as_json=as_json)
