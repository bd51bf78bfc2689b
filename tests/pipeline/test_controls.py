"""Negative controls: with the lock, the fence or the check of keys taken out, what they prevent happens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from batchgen.data import verification
from batchgen.data.commits import CommitLog, read_log
from batchgen.data.file_backend import LockedFile, OsBackend, OsWritableFile, WritableFile
from batchgen.data.files import OutputFiles
from batchgen.data.ledger import Ledger
from batchgen.data.rows import FinishedRow
from batchgen.errors import OutputLocked
from batchgen.pipeline.assembly import Assembly, WholeShard
from batchgen.pipeline.runner import run_job
from batchgen.pipeline.stored import read_output
from batchgen.pipeline.verify import verify
from tests.data.test_commits import shard
from tests.pipeline.fakes import FakeEngine, FakeWorld, make_job

FILES = OutputFiles()


class _Unlocked:
    """A lock that excludes nobody."""

    def write(self, data: bytes) -> None:
        pass

    def is_current(self) -> bool:
        return True

    def release(self) -> None:
        pass


class NoLock(OsBackend):
    """Every run gets the lock."""

    def try_lock(self, path: Path) -> LockedFile | None:
        return _Unlocked()


class NoFence(OsBackend):
    """A record that is there is overwritten."""

    def create(self, path: Path) -> WritableFile:
        path.unlink(missing_ok=True)
        return OsWritableFile(path)


def test_with_the_lock_a_second_run_is_turned_away(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    ledger = Ledger.acquire(FILES, job.output_dir)
    with pytest.raises(OutputLocked):
        run_job(job, services=FakeWorld().services)
    ledger.close()


def test_without_the_lock_two_runs_meet_and_the_fence_stops_one(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    ran = []

    def second_run() -> None:
        if not ran:
            ran.append(True)
            run_job(job, services=FakeWorld(backend=NoLock()).services)

    first = FakeWorld(backend=NoLock(), make=lambda: FakeEngine(on_step=second_run))
    with pytest.raises(OutputLocked, match="another run has"):
        run_job(job, services=first.services)
    assert verify(read_output(FILES, job.output_dir)).problems == []


def test_without_the_fence_a_record_is_lost(tmp_path: Path) -> None:
    def two_writers(files: OutputFiles) -> None:
        for number in (0, 1):
            CommitLog(files, tmp_path, "f", 0).append("shard", shard(number))

    with pytest.raises(OutputLocked):
        two_writers(FILES)
    two_writers(OutputFiles(NoFence()))
    assert [record.shard for record in read_log(FILES, tmp_path).records] == [shard(1)]


def test_without_the_check_of_keys_a_row_that_is_there_twice_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tmp_path)
    # A writer that is wrong: it writes the first row of each shard twice, and the last one not at all.
    monkeypatch.setattr(Assembly, "finish", finish_wrong())
    run_job(job, services=FakeWorld().services)
    monkeypatch.undo()
    assert len(verify(read_output(FILES, job.output_dir)).problems) == 3

    def no_check(*arguments: object) -> None:
        return None

    monkeypatch.setattr(verification, "_check_rows", no_check)
    assert verify(read_output(FILES, job.output_dir)).problems == []


def finish_wrong() -> Callable[[Assembly, FinishedRow], WholeShard | None]:
    right = Assembly.finish

    def finish(assembly: Assembly, row: FinishedRow) -> WholeShard | None:
        whole = right(assembly, row)
        return whole and whole._replace(rows=[whole.rows[0], *whole.rows[:-1]])

    return finish
