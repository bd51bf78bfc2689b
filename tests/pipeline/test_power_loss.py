"""Power fails before any operation of a run, and of its resume: no committed row is lost, none is there twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest

from batchgen.data.commits import read_log, record_path
from batchgen.data.file_backend import FileBackend, WritableFile
from batchgen.data.layout import OutputPaths
from batchgen.data.recovery import Recovery
from batchgen.errors import BatchgenError
from batchgen.pipeline.redo import repair, rerun
from batchgen.pipeline.runner import run_job
from batchgen.pipeline.session import OpenOptions
from tests.data.simulated_files import Fate, PowerCut, SimulatedBackend
from tests.pipeline.crashes import Rows, SimulatedDisk, committed_rows
from tests.pipeline.fakes import FakeEngine, FakeWorld, make_job

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


def small_disk(root: Path, wrap: Wrap = unchanged, num_rows: int = 6, **sections: Any) -> SimulatedDisk:
    """A job of three shards, with a journal that is synced at every step."""
    own = {"sampling": {"n": 1, "seed": 1}, "output": {"path": "out", "shard_rows": 2}}
    job = make_job(root, num_rows=num_rows, **own, **sections)
    return SimulatedDisk(job, wrap=wrap)


def check_cut(root: Path, cut_at: int, fate: Fate, expected: Rows, wrap: Wrap = unchanged) -> bool:
    """The power fails before one operation, and the job is run again; False where the run has no such operation."""
    disk = small_disk(root, wrap)
    if not disk.run_until_cut(cut_at):
        return False
    acknowledged = disk.num_acknowledged
    disk.backend.lose_power(fate, seed=cut_at)
    assert len(disk.durable_shards()) >= acknowledged
    disk.run()
    disk.check(expected)
    return True


@pytest.mark.parametrize("fate", ["lost", pytest.param("kept", marks=pytest.mark.slow), "mixed"])
def test_power_may_fail_before_any_operation(tmp_path: Path, expected: Rows, fate: Fate) -> None:
    for cut_at in count():
        if not check_cut(tmp_path, cut_at, fate, expected):
            return


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_power_may_fail_again_before_any_operation_of_the_resume(tmp_path: Path, expected: Rows, part: int) -> None:
    check_second_cuts(tmp_path, "mixed", "mixed", expected, second_step=3, part=part)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"), [("lost", "lost"), ("kept", "kept"), (None, "lost"), (None, "mixed")], ids=str
)
def test_power_may_fail_again_before_every_third_operation_of_the_resume(
    tmp_path: Path, expected: Rows, first: Fate | None, second: Fate
) -> None:
    """For every operation of the run every third of the resume, beginning with another one; None: a kill."""
    check_second_cuts(tmp_path, first, second, expected, second_step=3)


@pytest.mark.parametrize("first_fate", ["mixed", None], ids=["power", "kill"])
def test_power_may_fail_during_the_resume(tmp_path: Path, expected: Rows, first_fate: Fate | None) -> None:
    check_second_cuts(tmp_path, first_fate, "mixed", expected, second_step=17, first_step=13)


def check_second_cuts(
    root: Path,
    first_fate: Fate | None,
    second_fate: Fate,
    expected: Rows,
    second_step: int,
    first_step: int = 1,
    part: int = 0,
) -> None:
    """End a run before each operation, and its resume before each of its own; None: the first is killed.

    What a killed process has not synced is still there for the resume, and may go with the power.
    """
    for first in count(0, first_step):
        ended = small_disk(root)
        if not ended.run_until_cut(first):
            return
        if first_fate is None:
            ended.backend.restart()
        else:
            ended.backend.lose_power(first_fate, seed=first)
        committed = len(ended.durable_shards())
        for second in count((first + part) % second_step, second_step):
            disk = ended.copy()
            if not disk.run_until_cut(second):
                disk.check(expected)
                break
            acknowledged = committed + disk.num_acknowledged
            disk.backend.lose_power(second_fate, seed=second)
            if first_fate is not None:
                assert len(disk.durable_shards()) >= min(acknowledged, 3)
            disk.run()
            disk.check(expected)


def killed_before_the_sync_of_a_record(root: Path) -> SimulatedDisk:
    whole = small_disk(root)
    whole.run()
    disk = small_disk(root)
    at = next(at for at, line in enumerate(whole.backend.log) if line.startswith("sync ") and "/commits/" in line)
    assert disk.run_until_cut(at)
    disk.backend.restart()
    return disk


@pytest.mark.parametrize("settles", [True, False])
def test_a_record_that_a_killed_run_did_not_sync_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settles: bool
) -> None:
    """With its negative control: where it is trusted, later records stand, and it may not."""
    if not settles:
        monkeypatch.setattr(Recovery, "_settle", lambda *arguments: None)
    disk = killed_before_the_sync_of_a_record(tmp_path)
    disk.run()
    disk.backend.lose_power("lost")
    damaged = read_log(disk.files, OutputPaths(disk.job.output_dir).commits).damaged
    assert len(damaged) == (0 if settles else 1)


class Work(NamedTuple):
    """Something that is done to an output that is there."""

    prepare: Callable[[Path], SimulatedDisk]
    act: Callable[[SimulatedDisk], object]
    keeps: bool
    """Whether every committed file stays, or gives way to a new one, at every moment."""


def finished(root: Path) -> SimulatedDisk:
    disk = small_disk(root)
    disk.run()
    return disk


def of_another_job(root: Path) -> SimulatedDisk:
    job = make_job(root, num_rows=6, sampling={"n": 1, "seed": 2}, output={"path": "out", "shard_rows": 3})
    disk = SimulatedDisk(job)
    disk.run()
    return replace(small_disk(root), backend=disk.backend)


def of_fewer_rows(root: Path) -> SimulatedDisk:
    disk = small_disk(root, num_rows=4, input={"path": "in.jsonl", "on_growth": "append"})
    disk.run()
    make_job(root, num_rows=6)
    return disk


def damaged(root: Path) -> SimulatedDisk:
    """A file is gone, and the record of another one."""
    disk = finished(root)
    paths = OutputPaths(disk.job.output_dir)
    disk.backend.unlink(paths.shard(1))
    disk.backend.unlink(record_path(paths.commits, 0))
    for directory in (paths.data, paths.commits):
        disk.backend.sync_directory(directory)
    return disk


def rerun_half(disk: SimulatedDisk) -> None:
    """The rows are the same again, so only a loss would show."""
    rerun(disk.job, "batchgen.row % 2 == 0", services=disk.world().services)


def overwrite(disk: SimulatedDisk) -> None:
    run_job(disk.job, services=disk.world().services, options=OpenOptions(overwrite=True))


def put_right(disk: SimulatedDisk) -> None:
    repair(disk.job, services=disk.world().services)


WORKS = {
    "rerun": Work(finished, rerun_half, keeps=True),
    "overwrite": Work(of_another_job, overwrite, keeps=False),
    "append": Work(of_fewer_rows, SimulatedDisk.run, keeps=True),
    "repair": Work(damaged, put_right, keeps=False),
}


@pytest.mark.parametrize("name", WORKS)
def test_power_may_fail_during_work_on_an_output(tmp_path: Path, expected: Rows, name: str) -> None:
    check_work(tmp_path, WORKS[name], "mixed", expected, step=16)


@pytest.mark.slow
@pytest.mark.parametrize("fate", FATES)
@pytest.mark.parametrize("name", WORKS)
def test_power_may_fail_before_any_operation_of_work_on_an_output(
    tmp_path: Path, expected: Rows, name: str, fate: Fate
) -> None:
    check_work(tmp_path, WORKS[name], fate, expected, step=1)


def check_work(root: Path, work: Work, fate: Fate, expected: Rows, step: int) -> None:
    """The power fails before the N-th operation; what is done again is then done well."""
    before = work.prepare(root)
    before.backend.restart()
    for cut_at in count(0, step):
        disk = before.copy()
        disk.backend.cut_at = cut_at
        try:
            work.act(disk)
        except PowerCut:
            disk.backend.lose_power(fate, seed=cut_at)
        else:
            return
        assert not work.keeps or disk.durable_shards().keys() >= before.durable_shards().keys()
        work.act(disk)
        disk.run()
        disk.check(expected)


def test_a_killed_run_loses_no_token_that_it_noted(tmp_path: Path) -> None:
    """Killed after every second step, a job still comes to its end, and computes nothing twice."""
    whole = small_disk(tmp_path)
    num_tokens = whole.run().num_tokens
    disk = small_disk(tmp_path)
    worlds: list[FakeWorld] = []
    is_done = False
    while not is_done:
        steps = iter(range(2))

        def end_soon(steps: Iterator[int] = steps) -> None:
            if next(steps, None) is None:
                raise PowerCut

        worlds.append(FakeWorld(disk.backend, lambda end=end_soon: FakeEngine(on_step=end)))  # type: ignore[misc]
        with suppress(PowerCut):
            run_job(disk.job, services=worlds[-1].services)
            is_done = True
        disk.backend.restart()
    assert len(worlds) > 5
    assert sum(world.num_tokens for world in worlds) == num_tokens
    disk.check(committed_rows(whole.files, whole.job.output_dir))


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
    def wrap(backend: FileBackend) -> FileBackend:
        return WithoutSync(backend, part)  # type: ignore[return-value]

    def fails(cut_at: int, fate: Fate) -> bool:
        try:
            check_cut(tmp_path, cut_at, fate, expected, wrap)
        except (AssertionError, BatchgenError):
            return True
        return False

    whole = small_disk(tmp_path, wrap)
    whole.run()
    # The last moments first: then there is the most to lose.
    moments = reversed(range(whole.backend.num_operations))
    assert any(fails(cut_at, fate) for cut_at in moments for fate in FATES)


def test_the_simulated_disk_forgets_what_was_not_synced() -> None:
    backend = SimulatedBackend()
    home, lost_home = Path("/home"), Path("/lost")
    backend.make_directory(home)
    backend.sync_directory(Path("/"))
    backend.make_directory(lost_home)
    backend.create(lost_home / "synced").sync()
    backend.sync_directory(lost_home)
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
    assert backend.list_directory(Path("/")) == ["home"]
    assert sorted(backend.list_directory(home)) == ["kept", "lost"]
    assert backend.open_read(home / "kept").read() == b"one"
    assert backend.open_read(home / "lost").read() == b""
