"""Files beside an output that stand under their names only when they are complete."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from batchgen.errors import BatchgenError, JobError, OutputUnavailable

_NO_FILE = frozenset({errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG})
"""The name is a directory's, or below a file: as wrong when the command runs again."""


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """A file to write; it is synced and takes its name at the end, and leaves nothing where that fails.

    A pipe or a device is written as it is. Raises OutputUnavailable, and JobError where the path can be no file at all.
    """
    try:
        with path.open("w", encoding="utf-8", newline="\n") if _is_stream(path) else _replacement(path) as file:
            yield file
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError, remedy: str = "choose another file") -> BatchgenError:
    """What to raise where a file that the user has named cannot be written."""
    kind = JobError if error.errno in _NO_FILE else OutputUnavailable
    return kind(f"{path}: cannot be written: {error.strerror}; {remedy}")


def _is_stream(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


@contextmanager
def _replacement(path: Path) -> Iterator[TextIO]:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        with suppress(FileNotFoundError, NotADirectoryError):
            temporary.unlink()
