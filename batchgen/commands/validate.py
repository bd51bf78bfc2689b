"""`batchgen validate`: everything that can be wrong with a job file, without data or model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchgen.commands.document import print_document
from batchgen.config import load_job
from batchgen.errors import JobFileError


def validate(paths: Sequence[Path], overrides: Sequence[str], *, as_json: bool = False) -> None:
    """Print a line for each valid file; raises JobFileError with the problems of all others."""
    problems = {path: _problems(path, overrides) for path in paths}
    for path in () if as_json else paths:
        if not problems[path]:
            print(f"{path}: valid")
    document: dict[str, Any] = {
        "valid": not any(problems.values()),
        "jobs": [{"job": str(path), "valid": not found, "problems": found} for path, found in problems.items()],
    }
    if not document["valid"]:
        wrong = JobFileError([problem for found in problems.values() for problem in found])
        wrong.result = document
        raise wrong
    if as_json:
        print_document(document)


def _problems(path: Path, overrides: Sequence[str]) -> list[str]:
    try:
        load_job(path, overrides)
    except JobFileError as error:
        return error.problems
    return []
