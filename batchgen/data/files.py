"""The one seam for file operations on the output: whatever must survive a crash goes through `OutputFiles`.

`FileBackend` is what tests replace: by one that kills the process or fails at the N-th operation, or by a simulated
file system that loses power. `OutputFiles` turns what a backend raises into batchgen's errors; only two answers of
the system are signals rather than failures and pass through: FileExistsError where an exclusive name is taken, and
FileNotFoundError where a file is read that is not there.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from batchgen.data.file_backend import FileBackend, FileStatus, LockedFile, OsBackend, WritableFile
from batchgen.errors import JobError, OutputUnavailable


@contextmanager
def _explained(action: str, path: Path, *signals: type[OSError]) -> Iterator[None]:
    """Raise OutputUnavailable with the path and the reason for any OSError that is not one of `signals`.

    JobError where a file stands on the way to the path: no run could ever do better.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOTDIR and (file := _first((*path.parents, path), lambda each: each.exists())):
            raise JobError(
                f"{file}: is a file, where a directory must be; choose another output.path, or move it away"
            ) from error
        # What it leads to may be on a disk that is not mounted.
        if error.errno == errno.ENOENT and (link := _first(path.parents, lambda each: each.is_symlink())):
            raise OutputUnavailable(
                f"{link}: is a symbolic link to a directory that is not there; make it and run again"
            ) from error
        if isinstance(error, signals):
            raise
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise OutputUnavailable(f"{path}: cannot {action}: {reason}; {remedy(error.errno)}") from error


def _first(paths: Iterable[Path], is_such: Callable[[Path], bool]) -> Path | None:
    """The outermost of paths that hold each other that is no directory, and is such."""
    by_depth = sorted(paths, key=lambda each: len(each.parts))
    return next((each for each in by_depth if not each.is_dir() and is_such(each)), None)


def remedy(code: int | None) -> str:
    """What to do about an error of the system."""
    match code:
        case errno.ENOSPC | errno.EDQUOT:
            return "free some space and run again: what is committed is intact"
        case errno.EMFILE | errno.ENFILE:
            return "raise the limit of open files (ulimit -n) and run again: what is committed is intact"
        case errno.EFBIG:
            return "raise the limit of file sizes (ulimit -f) and run again: what is committed is intact"
        case errno.ELOOP:
            return "it is a symbolic link, which batchgen never follows; remove it"
    return "mend it and run again: what is committed is intact"


class _ExplainedFile:
    """A new file whose errors name it, and the bytes it was given so far."""

    def __init__(self, file: WritableFile, path: Path) -> None:
        self._file = file
        self._path = path
        self._num_bytes = 0

    def write(self, data: bytes) -> None:
        with _explained(f"write {len(data)} bytes after {self._num_bytes}", self._path):
            self._file.write(data)
        self._num_bytes += len(data)

    def sync(self) -> None:
        with _explained(f"sync {self._num_bytes} bytes", self._path):
            self._file.sync()

    def close(self) -> None:
        with _explained("close", self._path):
            self._file.close()


class OutputFiles:
    """File operations on the output, with errors that say which file and what to do.

    Every method raises OutputUnavailable (exit code 74) besides what it names, and JobError where a file stands on the
    way to a path.
    """

    def __init__(self, backend: FileBackend | None = None) -> None:
        self._backend: FileBackend = backend or OsBackend()

    def create(self, path: Path) -> WritableFile:
        """Open a new file for writing; FileExistsError where the name is taken."""
        with _explained("create", path, FileExistsError):
            return _ExplainedFile(self._backend.create(path), path)

    def write_new(self, path: Path, data: bytes) -> None:
        """Create, write, sync and close one small file; FileExistsError where the name is taken.

        Where a step fails, the file is removed if it can be: an unsynced file must not pass for a durable one.
        """
        file = self.create(path)
        try:
            file.write(data)
            file.sync()
            file.close()
        except OutputUnavailable:
            with suppress(OutputUnavailable):
                file.close()
            with suppress(OutputUnavailable):
                self.unlink(path)
            raise

    def replace(self, path: Path, data: bytes, temporary: Path) -> None:
        """Write `path` anew, atomically and durably, by way of the unused name `temporary`."""
        self.write_new(temporary, data)
        self.rename(temporary, path)
        self.sync_directory(path.parent)

    def open_read(self, path: Path) -> BinaryIO:
        """Open for reading; FileNotFoundError where it is not there; symbolic links are refused."""
        with _explained("open", path, FileNotFoundError):
            return self._backend.open_read(path)

    def read(self, path: Path) -> bytes:
        """The whole content; FileNotFoundError where it is not there."""
        with self.open_read(path) as file, _explained("read", path):
            return file.read()

    def link(self, source: Path, target: Path) -> None:
        """Publish `source` under a second name; FileExistsError where that name is taken."""
        with _explained(f"link {source.name} to it", target, FileExistsError):
            self._backend.link(source, target)

    def rename(self, source: Path, target: Path) -> None:
        """Move `source` over `target`."""
        with _explained(f"rename {source.name} to it", target):
            self._backend.rename(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a name; one that is not there is no error."""
        with suppress(FileNotFoundError), _explained("remove", path, FileNotFoundError):
            self._backend.unlink(path)

    def make_directory(self, path: Path) -> None:
        """Make one directory if it is not there; its name is durable after `sync_directory` of the parent."""
        with suppress(FileExistsError), _explained("make the directory", path, FileExistsError):
            self._backend.make_directory(path)

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""
        with _explained("sync the directory", path):
            self._backend.sync_directory(path)

    def list_directory(self, path: Path) -> list[str]:
        """Sorted names in the directory; empty where it is not there."""
        try:
            with _explained("list", path, FileNotFoundError):
                return sorted(self._backend.list_directory(path))
        except FileNotFoundError:
            return []

    def status(self, path: Path) -> FileStatus | None:
        """Size and kind of the entry itself, None where there is none."""
        try:
            with _explained("look at", path, FileNotFoundError):
                return self._backend.status(path)
        except FileNotFoundError:
            return None

    def try_lock(self, path: Path) -> LockedFile | None:
        """Lock the file until released or until this process ends; None where another process holds it."""
        with _explained("lock", path):
            return self._backend.try_lock(path)

    def is_locked(self, path: Path) -> bool:
        """Whether a process holds the lock; False where there is no such file."""
        try:
            with _explained("look at", path, FileNotFoundError):
                return self._backend.is_locked(path)
        except FileNotFoundError:
            return False
