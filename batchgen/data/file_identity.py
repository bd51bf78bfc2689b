"""Which bytes a file holds: its status and hash, and whether it stayed the same while it was read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from batchgen.errors import InputError


@dataclass(slots=True)
class FileIdentity:
    """Status and hash of a file; the hash is there once the context of `file_identity` has ended."""

    size: int
    mtime_ns: int
    inode: int
    sha256: str = ""


@contextmanager
def file_identity(path: Path) -> Iterator[FileIdentity]:
    """Hash the file after the body has read it; InputError where it changed meanwhile."""
    before = _status(path)
    identity = FileIdentity(before.st_size, before.st_mtime_ns, before.st_ino)
    yield identity
    try:
        with path.open("rb") as file:
            identity.sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    after = _status(path)
    if (after.st_size, after.st_mtime_ns, after.st_ino) != (identity.size, identity.mtime_ns, identity.inode):
        raise InputError(f"{path}: changed while it was read; run again when it is complete")


def is_unchanged(path: Path, size: int, mtime_ns: int, inode: int) -> bool:
    """Whether the file's status is still the given one."""
    try:
        now = path.stat()
    except OSError:
        return False
    return (now.st_size, now.st_mtime_ns, now.st_ino) == (size, mtime_ns, inode)


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
