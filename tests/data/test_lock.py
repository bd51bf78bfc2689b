"""One output has one writer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchgen.data.files import OutputFiles
from batchgen.data.lock import OutputLock, read_holder
from batchgen.errors import OutputLocked

FILES = OutputFiles()


def acquire(tmp_path: Path, **options: object) -> OutputLock:
    return OutputLock.acquire(FILES, tmp_path / "lock", "attempt", **options)  # type: ignore[arg-type]


def test_the_lock_names_its_holder(tmp_path: Path) -> None:
    lock = acquire(tmp_path)
    holder = read_holder(FILES, tmp_path / "lock")
    assert holder == lock.holder
    assert holder is not None
    assert (holder.pid, holder.attempt) == (os.getpid(), "attempt")
    with pytest.raises(OutputLocked, match=rf"locked by host .*, pid {os.getpid()}, since .*--wait-lock"):
        acquire(tmp_path)
    lock.release()


def test_a_holder_that_has_not_written_yet_is_said_to_be_unknown(tmp_path: Path) -> None:
    held = FILES.try_lock(tmp_path / "lock")
    assert held is not None
    assert read_holder(FILES, tmp_path / "lock") is None
    with pytest.raises(OutputLocked, match="has not said who it is"):
        acquire(tmp_path)
    held.release()


def test_waiting_ends_when_the_lock_is_free(tmp_path: Path) -> None:
    first = acquire(tmp_path)
    naps = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            first.release()

    second = acquire(tmp_path, wait_seconds=60.0, sleep=sleep)
    assert len(naps) == 3
    second.release()


def test_waiting_has_an_end(tmp_path: Path) -> None:
    first = acquire(tmp_path)
    naps: list[float] = []
    with pytest.raises(OutputLocked):
        acquire(tmp_path, wait_seconds=1.0, sleep=naps.append)
    assert sum(naps) == pytest.approx(1.0)
    first.release()


def test_a_lock_that_was_removed_stops_its_holder(tmp_path: Path) -> None:
    lock = acquire(tmp_path)
    lock.check()
    (tmp_path / "lock").unlink()
    other = acquire(tmp_path)
    with pytest.raises(OutputLocked, match="removed or replaced"):
        lock.check()
    other.check()
    lock.release()
    other.release()


def test_the_lock_dies_with_its_process(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from batchgen.data.files import OutputFiles;"
        "from batchgen.data.lock import OutputLock;"
        "lock = OutputLock.acquire(OutputFiles(), Path(sys.argv[1]), 'dead'); print('held', flush=True); input()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(OutputLocked, match=f"pid {child.pid}"):
            acquire(tmp_path)
        child.kill()
    acquire(tmp_path).release()
