"""What the output needs of a file system, and the operating system's answer to it."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol


class FileStatus(NamedTuple):
    """What a directory entry is, without following symbolic links."""

    size: int
    is_regular: bool
    inode: int
    mtime_ns: int


class WritableFile(Protocol):
    """A new file; closed without `sync`, its content may be lost."""

    def write(self, data: bytes) -> None:
        """Append all of `data`."""

    def sync(self) -> None:
        """Make what was written survive a loss of power."""

    def close(self) -> None:
        """Give the descriptor back; a second call does nothing."""


class LockedFile(Protocol):
    """An exclusive lock that ends with the process, whatever ends it."""

    def write(self, data: bytes) -> None:
        """Replace the content of the lock file."""

    def is_current(self) -> bool:
        """Whether the path still names the file that is locked."""

    def release(self) -> None:
        """End the lock; a second call does nothing."""


class FileBackend(Protocol):
    """The operations a file system must offer; all raise OSError."""

    def create(self, path: Path) -> WritableFile:
        """Open a file that must not exist yet; FileExistsError where it does."""

    def open_read(self, path: Path) -> BinaryIO:
        """Open for reading, seekable; symbolic links are refused."""

    def link(self, source: Path, target: Path) -> None:
        """Give the file a second name; FileExistsError where `target` exists."""

    def rename(self, source: Path, target: Path) -> None:
        """Move a file over `target`, atomically."""

    def unlink(self, path: Path) -> None:
        """Remove a name."""

    def make_directory(self, path: Path) -> None:
        """Make one directory; FileExistsError where it is there."""

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory survive a loss of power."""

    def list_directory(self, path: Path) -> list[str]:
        """Names in the directory."""

    def status(self, path: Path) -> FileStatus:
        """Size and kind of the entry itself."""

    def try_lock(self, path: Path) -> LockedFile | None:
        """Lock the file, made where it is not there; None where another process holds it."""

    def is_locked(self, path: Path) -> bool:
        """Whether a process holds the lock; for a moment this can keep another from taking it."""


class OsWritableFile:
    """A file of the operating system, opened exclusively."""

    def __init__(self, path: Path) -> None:
        self._fd: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._open_fd(), view) :]

    def sync(self) -> None:
        os.fsync(self._open_fd())

    def close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)

    def _open_fd(self) -> int:
        assert self._fd is not None, "the file is closed"
        return self._fd


class OsLockedFile:
    """flock on an open descriptor: no child inherits it, so it dies with this process."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd: int | None = fd

    def write(self, data: bytes) -> None:
        assert self._fd is not None
        os.pwrite(self._fd, data, 0)
        os.ftruncate(self._fd, len(data))

    def is_current(self) -> bool:
        assert self._fd is not None
        try:
            named = os.stat(self._path)
        except FileNotFoundError:
            return False
        held = os.fstat(self._fd)
        return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)

    def release(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)


class OsBackend:
    """A local file system through the operating system."""

    def create(self, path: Path) -> WritableFile:
        return OsWritableFile(path)

    def open_read(self, path: Path) -> BinaryIO:
        # A symbolic link in the place of a shard is never followed: it may lead anywhere.
        return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")

    def link(self, source: Path, target: Path) -> None:
        os.link(source, target, follow_symlinks=False)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def make_directory(self, path: Path) -> None:
        os.mkdir(path)

    def sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def list_directory(self, path: Path) -> list[str]:
        return os.listdir(path)

    def status(self, path: Path) -> FileStatus:
        found = os.lstat(path)
        return FileStatus(found.st_size, stat.S_ISREG(found.st_mode), found.st_ino, found.st_mtime_ns)

    def try_lock(self, path: Path) -> LockedFile | None:
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            locked = OsLockedFile(path, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                locked.release()
                return None
            except OSError:
                locked.release()
                raise
            # Between open and lock the file may have been replaced; a lock on a nameless file excludes nobody.
            if locked.is_current():
                return locked
            locked.release()

    def is_locked(self, path: Path) -> bool:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False
