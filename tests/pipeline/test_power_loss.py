"""Power fails before any operation of a run, and of its resume: no committed row is lost, none is there twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import get_args

import pytest

from batchgen.data.file_backend import FileBackend, WritableFile
from batchgen.errors import BatchgenError
from batchgen.pipeline.redo import rerun
from tests.data.simulated_files import Fate, PowerCut, SimulatedBackend
from tests.pipeline.crashes import Rows, SimulatedDisk, committed_rows
from tests.pipeline.fakes import FakeWorld, make_job

FATES = get_args(Fate)
Wrap = Callable[[FileBackend], FileBackend]


def unchanged(backend: FileBackend) -> FileBackend:
    return backend


@pytest.fixture
def expected(tmp_path: Path) -> Rows:
    """The rows of the undisturbed run."""
    disk = small_disk(tmp_path)
    disk.run()
    return committed_rows(disk.files, disk.job.output_dir)


def small_disk(root: Path, wrap: Wrap = unchanged) -> SimulatedDisk:
    """A job of three shards, with a journal that is synced at every step."""
    job = make_job(root, num_rows=6, sampling={"n": 1, "seed": 1}, output={"path": "out", "shard_rows": 2})
    return SimulatedDisk(job, wrap=wrap)


def cut_runs(root: Path, fate: Fate, wrap: Wrap) -> Iterator[SimulatedDisk]:
    """A disk for every moment at which the power can fail, switched on again."""
    for cut_at in count():
        disk = small_disk(root, wrap)
        if not disk.run_until_cut(cut_at):
            return
        acknowledged = disk.num_acknowledged
        disk.backend.lose_power(fate, seed=cut_at)
        assert len(disk.durable_shards()) >= acknowledged
        yield disk


def check_every_cut(root: Path, fate: Fate, expected: Rows, wrap: Wrap = unchanged) -> None:
    for disk in cut_runs(root, fate, wrap):
        disk.run()
        disk.check(expected)


@pytest.mark.parametrize("fate", ["lost", pytest.param("kept", marks=pytest.mark.slow), "mixed"])
def test_power_may_fail_before_any_operation(tmp_path: Path, expected: Rows, fate: Fate) -> None:
    check_every_cut(tmp_path, fate, expected)


@pytest.mark.slow
@pytest.mark.parametrize("fate", FATES)
def test_power_may_fail_again_before_any_operation_of_the_resume(tmp_path: Path, expected: Rows, fate: Fate) -> None:
    check_second_cuts(tmp_path, fate, expected, step=1)


def test_power_may_fail_again_during_the_resume(tmp_path: Path, expected: Rows) -> None:
    check_second_cuts(tmp_path, "mixed", expected, step=13)


def check_second_cuts(root: Path, fate: Fate, expected: Rows, step: int) -> None:
    for first in count(0, step):
        for second in count(first % step, step):
            disk = small_disk(root)
            if not disk.run_until_cut(first):
                return
            disk.backend.lose_power(fate, seed=first)
            committed = len(disk.durable_shards())
            if not disk.run_until_cut(second):
                disk.check(expected)
                break
            acknowledged = committed + disk.num_acknowledged
            disk.backend.lose_power(fate, seed=second)
            assert len(disk.durable_shards()) >= min(acknowledged, 3)
            disk.run()
            disk.check(expected)


def test_power_may_fail_during_a_rerun(tmp_path: Path, expected: Rows) -> None:
    check_reruns(tmp_path, "mixed", expected, step=6)


@pytest.mark.slow
@pytest.mark.parametrize("fate", FATES)
def test_power_may_fail_before_any_operation_of_a_rerun(tmp_path: Path, expected: Rows, fate: Fate) -> None:
    check_reruns(tmp_path, fate, expected, step=1)


def check_reruns(root: Path, fate: Fate, expected: Rows, step: int) -> None:
    """Each shard is the old or the new file; the rows are the same in both, so only a loss would show."""
    chosen = "batchgen.row % 2 == 0"
    for cut_at in count(0, step):
        disk = small_disk(root)
        disk.run()
        disk.backend.restart()
        disk.backend.cut_at = cut_at
        try:
            rerun(disk.job, chosen, services=FakeWorld(backend=disk.backend).services)
        except PowerCut:
            disk.backend.lose_power(fate, seed=cut_at)
        else:
            return
        assert len(disk.durable_shards()) == 3
        rerun(disk.job, chosen, services=FakeWorld(backend=disk.backend).services)
        disk.run()
        disk.check(expected)


def test_a_killed_process_keeps_what_the_system_has(tmp_path: Path, expected: Rows) -> None:
    for cut_at in count():
        disk = small_disk(tmp_path)
        if not disk.run_until_cut(cut_at):
            return
        disk.backend.restart()
        disk.run()
        disk.check(expected)


class _Unsynced:
    """A new file whose sync does nothing."""

    def __init__(self, file: WritableFile) -> None:
        self.write = file.write
        self.close = file.close

    def sync(self) -> None:
        pass


class WithoutSync:
    """A backend that forgets to sync some files or directories."""

    def __init__(self, backend: FileBackend, part: str) -> None:
        self._backend = backend
        self._part = part

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)

    def create(self, path: Path) -> WritableFile:
        file = self._backend.create(path)
        return _Unsynced(file) if self._part in str(path) else file

    def sync_directory(self, path: Path) -> None:
        if not str(path).endswith(self._part):
            self._backend.sync_directory(path)


@pytest.mark.parametrize("part", ["part-0", "out/data", ".json", "out/_batchgen/commits", "plan.json", "out/_batchgen"])
def test_without_one_kind_of_sync_the_test_above_fails(tmp_path: Path, expected: Rows, part: str) -> None:
    def fails(fate: Fate) -> bool:
        try:
            check_every_cut(tmp_path, fate, expected, lambda backend: WithoutSync(backend, part))  # type: ignore[arg-type,return-value]
        except (AssertionError, BatchgenError):
            return True
        return False

    assert any(fails(fate) for fate in ("mixed", "lost", "kept"))


def test_the_simulated_disk_forgets_what_was_not_synced() -> None:
    backend = SimulatedBackend()
    home = Path("/home")
    backend.make_directory(home)
    kept, lost = backend.create(home / "kept"), backend.create(home / "lost")
    kept.write(b"one")
    kept.sync()
    lost.write(b"two")
    backend.sync_directory(home)
    backend.create(home / "nameless")
    backend.cut_at = 0
    with pytest.raises(PowerCut):
        kept.sync()
    backend.lose_power("lost")
    assert sorted(backend.list_directory(home)) == ["kept", "lost"]
    assert backend.open_read(home / "kept").read() == b"one"
    assert backend.open_read(home / "lost").read() == b""
