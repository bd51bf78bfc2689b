"""`batchgen validate`: everything that can be wrong with a job file, without data or model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from batchgen.config import load_job
from batchgen.errors import JobFileError


def validate(paths: Sequence[Path], overrides: Sequence[str]) -> None:
    """Print a line for each valid file; raises JobFileError with the problems of all others."""
    problems: list[str] = []
    for path in paths:
        try:
            load_job(path, overrides)
        except JobFileError as error:
            problems += error.problems
        else:
            print(f"{path}: valid")
    if problems:
        raise JobFileError(problems)
