"""One writer: a lock of the operating system on the output, which dies with its process."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from batchgen.data.file_backend import LockedFile
from batchgen.data.files import OutputFiles
from batchgen.errors import OutputLocked

_POLL_SECONDS = 0.2
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class LockHolder(NamedTuple):
    """Who holds the lock, as it wrote itself into the lock file."""

    host: str
    pid: int
    boot: str
    """Which start of the machine: tells whether the pid can still be the same process."""
    attempt: str
    since: str
    """ISO 8601, UTC."""

    def describe(self) -> str:
        """`host a, pid 7, since 2026-01-01T00:00:00+00:00`."""
        return f"host {self.host}, pid {self.pid}, since {self.since}"


def this_process(attempt: str) -> LockHolder:
    """The holder that this process would be."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return LockHolder(platform.node(), os.getpid(), boot, attempt, datetime.now(UTC).isoformat(timespec="seconds"))


def read_holder(files: OutputFiles, path: Path) -> LockHolder | None:
    """Who last held the lock; None where nobody ever did, or just began to."""
    try:
        return LockHolder(**json.loads(files.read(path)))
    except (FileNotFoundError, ValueError, TypeError):
        return None


class OutputLock:
    """The right to write one output; `release` or the end of the process gives it up."""

    def __init__(self, path: Path, locked: LockedFile, holder: LockHolder) -> None:
        self.path = path
        self.holder = holder
        self._locked = locked

    @classmethod
    def acquire(
        cls,
        files: OutputFiles,
        path: Path,
        attempt: str,
        wait_seconds: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> OutputLock:
        """Take the lock, waiting for it if asked to; raises OutputLocked, which names the holder."""
        waited = 0.0
        while (locked := files.try_lock(path)) is None:
            # Once more in any case: someone who asks whether it is locked keeps it for a moment.
            if waited >= max(wait_seconds, _POLL_SECONDS):
                holder = read_holder(files, path)
                who = holder.describe() if holder else "a process that has not said who it is"
                raise OutputLocked(f"{path.parent.parent}: locked by {who}; wait until it ends, or use --wait-lock")
            sleep(_POLL_SECONDS)
            waited += _POLL_SECONDS
        holder = this_process(attempt)
        locked.write(json.dumps(holder._asdict()).encode())
        return cls(path, locked, holder)

    def check(self) -> None:
        """Raise OutputLocked where the lock file was removed or replaced: another run may hold the new one."""
        if not self._locked.is_current():
            raise OutputLocked(f"{self.path}: was removed or replaced while this run held it; nothing more is written")

    def release(self) -> None:
        """Give the lock up; a second call does nothing."""
        self._locked.release()
