"""A file system in memory that can lose its power: what was not synced is gone, or there in part."""

from __future__ import annotations

import errno
import io
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

from batchgen.data.file_backend import FileStatus, LockedFile, WritableFile

Fate = Literal["lost", "kept", "mixed"]
"""What becomes of names and bytes that were not synced: none, all, or some by chance is on the disk."""


class PowerCut(BaseException):
    """The machine is off: nothing that the program does now has an effect. No handler of errors may catch it."""


@dataclass
class Inode:
    """One file: its bytes, and those of them that are on the disk. Or a directory."""

    number: int
    content: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    directory: Directory | None = None


@dataclass
class Directory:
    """Names, and the changes to them that are not on the disk yet, oldest first."""

    entries: dict[str, Inode] = field(default_factory=dict)
    durable: dict[str, Inode] = field(default_factory=dict)
    pending: list[tuple[str, Inode | None]] = field(default_factory=list)

    def set(self, name: str, inode: Inode | None) -> None:
        """Change a name; None removes it."""
        if inode is None:
            del self.entries[name]
        else:
            self.entries[name] = inode
        self.pending.append((name, inode))


class SimulatedBackend:
    """A FileBackend whose power fails before its N-th operation.

    A rename within or across directories is a change of two names, of which any may reach the disk first. A directory
    whose name is lost takes everything in it along.
    """

    def __init__(self, cut_at: int | None = None) -> None:
        self.cut_at = cut_at
        self.num_operations = 0
        self.log: list[str] = []
        self.before: Callable[[str, Path], None] | None = None
        """Called before each operation with its kind and path; may raise OSError, or end the process."""
        self.is_off = False
        self._root = Directory()
        self._num_inodes = 0
        self._locks: set[Path] = set()

    def lose_power(self, fate: Fate, seed: int = 0) -> None:
        """Forget what was not durable, and switch on again."""
        chance = random.Random(seed)
        inodes = _reachable(self._root)
        for directory in [self._root, *(inode.directory for inode in inodes if inode.directory is not None)]:
            for name, inode in _surviving(directory.pending, fate, chance):
                if inode is None:
                    directory.durable.pop(name, None)
                else:
                    directory.durable[name] = inode
            directory.pending.clear()
            directory.entries = dict(directory.durable)
        for inode in inodes:
            written = bytes(inode.content)
            inode.durable = _surviving_content(inode.durable, written, fate, chance)
            inode.content = bytearray(inode.durable)
        self._locks.clear()
        self.restart()

    def restart(self) -> None:
        """Switch on again, with everything as it was: what a crash of the process alone leaves."""
        self._locks.clear()
        self.is_off = False
        self.cut_at = None
        self.num_operations = 0
        self.log.clear()

    def operation(self, kind: str, path: Path) -> None:
        """Count one operation; the power may fail before it."""
        if self.is_off:
            raise PowerCut
        if self.cut_at is not None and self.num_operations >= self.cut_at:
            self.is_off = True
            raise PowerCut
        if self.before is not None:
            self.before(kind, path)
        self.num_operations += 1
        self.log.append(f"{kind} {path}")

    def create(self, path: Path) -> WritableFile:
        self.operation("create", path)
        directory = self._directory(path.parent)
        if path.name in directory.entries:
            raise FileExistsError(errno.EEXIST, "exists", str(path))
        inode = self._new_inode(None)
        directory.set(path.name, inode)
        return SimulatedFile(self, path, inode)

    def _new_inode(self, directory: Directory | None) -> Inode:
        self._num_inodes += 1
        return Inode(self._num_inodes, directory=directory)

    def open_read(self, path: Path) -> BinaryIO:
        self._refuse_off()
        return io.BytesIO(bytes(self._inode(path).content))

    def link(self, source: Path, target: Path) -> None:
        self.operation("link", target)
        directory = self._directory(target.parent)
        if target.name in directory.entries:
            raise FileExistsError(errno.EEXIST, "exists", str(target))
        directory.set(target.name, self._inode(source))

    def rename(self, source: Path, target: Path) -> None:
        self.operation("rename", target)
        inode = self._inode(source)
        self._directory(target.parent).set(target.name, inode)
        self._directory(source.parent).set(source.name, None)

    def unlink(self, path: Path) -> None:
        self.operation("unlink", path)
        self._inode(path)
        self._directory(path.parent).set(path.name, None)

    def make_directory(self, path: Path) -> None:
        self.operation("make_directory", path)
        parent = self._directory(path.parent)
        if path.name in parent.entries:
            raise FileExistsError(errno.EEXIST, "exists", str(path))
        parent.set(path.name, self._new_inode(Directory()))

    def sync_directory(self, path: Path) -> None:
        self.operation("sync_directory", path)
        directory = self._directory(path)
        directory.durable = dict(directory.entries)
        directory.pending.clear()

    def list_directory(self, path: Path) -> list[str]:
        self._refuse_off()
        return list(self._directory(path).entries)

    def status(self, path: Path) -> FileStatus:
        self._refuse_off()
        if path == path.parent:
            return FileStatus(0, False, 0, 0)
        inode = self._inode(path)
        return FileStatus(len(inode.content), inode.directory is None, inode.number, 0)

    def try_lock(self, path: Path) -> LockedFile | None:
        self._refuse_off()
        if path in self._locks:
            return None
        self._locks.add(path)
        return SimulatedLock(self, path)

    def is_locked(self, path: Path) -> bool:
        return path in self._locks

    def unlock(self, path: Path) -> None:
        """End a lock."""
        self._locks.discard(path)

    def _refuse_off(self) -> None:
        if self.is_off:
            raise PowerCut

    def _directory(self, path: Path) -> Directory:
        directory: Directory | None = self._root
        for name in path.parts[1:]:
            inode = directory.entries.get(name) if directory is not None else None
            directory = None if inode is None else inode.directory
        if directory is None:
            raise FileNotFoundError(errno.ENOENT, "no such directory", str(path))
        return directory

    def _inode(self, path: Path) -> Inode:
        inode = self._directory(path.parent).entries.get(path.name)
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        return inode


class SimulatedFile:
    """A new file of a SimulatedBackend."""

    def __init__(self, backend: SimulatedBackend, path: Path, inode: Inode) -> None:
        self._backend = backend
        self._path = path
        self._inode = inode

    def write(self, data: bytes) -> None:
        self._backend.operation("write", self._path)
        self._inode.content += data

    def sync(self) -> None:
        self._backend.operation("sync", self._path)
        self._inode.durable = bytes(self._inode.content)

    def close(self) -> None:
        pass


class SimulatedLock:
    """A lock of a SimulatedBackend; ends with the power, as one of the system ends with its process."""

    def __init__(self, backend: SimulatedBackend, path: Path) -> None:
        self._backend = backend
        self._path = path

    def write(self, data: bytes) -> None:
        pass

    def is_current(self) -> bool:
        return True

    def release(self) -> None:
        self._backend.unlock(self._path)


def _reachable(root: Directory) -> list[Inode]:
    """Every file and directory that has a name now, on the disk, or in a change that is not on it yet."""
    found: dict[int, Inode] = {}
    left = [root]
    while left:
        directory = left.pop()
        pending = [inode for _, inode in directory.pending if inode is not None]
        for inode in (*directory.entries.values(), *directory.durable.values(), *pending):
            if id(inode) not in found:
                found[id(inode)] = inode
                if inode.directory is not None:
                    left.append(inode.directory)
    return list(found.values())


def _surviving(
    pending: list[tuple[str, Inode | None]], fate: Fate, chance: random.Random
) -> list[tuple[str, Inode | None]]:
    if fate == "lost":
        return []
    return [change for change in pending if fate == "kept" or chance.random() < 0.5]


def _surviving_content(durable: bytes, written: bytes, fate: Fate, chance: random.Random) -> bytes:
    """What was synced, and of what was written after it nothing, all but the last byte, or a piece, perhaps garbled."""
    rest = written[len(durable) :]
    if fate == "lost" or not rest:
        return durable
    if fate == "kept":
        return durable + rest[:-1]
    torn = rest[: chance.randrange(len(rest) + 1)]
    return durable + (torn if chance.random() < 0.5 else bytes(len(torn)))
