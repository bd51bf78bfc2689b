"""`batchgen init`: a first job file for some data."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from batchgen.commands.document import print_document
from batchgen.config import load_job
from batchgen.errors import JobError
from batchgen.pipeline.draft import draft_job
from batchgen.pipeline.whole_file import unwritable


def init(inputs: Sequence[Path], *, model: str, job: Path, as_json: bool = False) -> None:
    """Write the job file and print its path; raises JobError where it is there already, InputError for the data."""
    if job.exists():
        raise JobError(f"{job}: is there already; name another file with --job")
    text = draft_job(inputs, model, job)
    try:
        with job.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise unwritable(job, error, "name another file with --job") from error
    load_job(job)
    if as_json:
        print_document({"job": str(job)})
    else:
        print(job)
    print(f"edit it, then: batchgen preview {job}; batchgen plan {job}; batchgen run {job}", file=sys.stderr)
