"""Real processes, really killed: at every file operation, at random moments, out of space, and many at once."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Literal, get_args

import pytest

from batchgen.config import JobConfig
from batchgen.data.file_backend import OsBackend, WritableFile
from batchgen.data.files import OutputFiles
from batchgen.errors import OutputUnavailable
from batchgen.pipeline.runner import run_job
from batchgen.signals import SIGNALS
from tests.pipeline.crash_server import CountingBackend, CrashServer, Run
from tests.pipeline.crashes import Rows, check_output, committed_rows
from tests.pipeline.fakes import FakeWorld, make_job
from tests.pipeline.kills import Killed, kill_at_random
from tests.tokenizers import byte_level, save

FILES = OutputFiles()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CrashServer]:
    with CrashServer(tmp_path_factory.mktemp("log") / "stderr") as server:
        yield server


@pytest.fixture
def memory_dir(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: thousands of real syncs take minutes on a disk."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        yield Path(directory)


def rows_of(job: JobConfig) -> Rows:
    return committed_rows(FILES, job.output_dir)


def undisturbed(root: Path, job: JobConfig) -> Rows:
    """The rows of a run that nothing happens to."""
    calm = job.model_copy(update={"output": job.output.model_copy(update={"path": "calm"})})
    run_job(calm, services=FakeWorld().services)
    return rows_of(calm)


def small(root: Path, path: str = "out") -> JobConfig:
    """Three shards, with a journal that is synced at every step."""
    return make_job(root, num_rows=6, sampling={"n": 1, "seed": 1}, output={"path": path, "shard_rows": 2})


def check_kills(root: Path, server: CrashServer, first_step: int, second_step: int | None) -> None:
    """Kill at the N-th operation, and the resume at its M-th; the third run must end well."""
    expected = undisturbed(root, small(root))
    for first in count(0, first_step):
        for second in count(first % (second_step or 1), second_step) if second_step else [None]:
            job = small(root, f"out-{first}-{second}")
            if server.run(Run.of(job, kill_at=first)) != -signal.SIGKILL:
                return
            ended = second is None or server.run(Run.of(job, kill_at=second)) == 0
            assert server.run(Run.of(job)) == 0
            check_output(FILES, job.output_dir, expected)
            if ended and second is not None:
                break


@pytest.mark.case(44)
def test_a_run_may_be_killed_at_any_file_operation(memory_dir: Path, server: CrashServer) -> None:
    check_kills(memory_dir, server, first_step=4, second_step=None)


def test_a_resume_may_be_killed_too(memory_dir: Path, server: CrashServer) -> None:
    check_kills(memory_dir, server, first_step=23, second_step=19)


@pytest.mark.slow
def test_a_run_and_its_resume_may_be_killed_at_every_file_operation(memory_dir: Path, server: CrashServer) -> None:
    """Every operation of the run; for each of them every fifth of the resume, beginning with another one."""
    check_kills(memory_dir, server, first_step=1, second_step=5)


def check_redone(root: Path, server: CrashServer, command: Literal["rerun", "overwrite"], step: int) -> None:
    """Kill a command over a finished output at its N-th operation; when it has been run again, all is well."""
    expected = undisturbed(root, small(root))
    before = small(root, "before")
    if command == "overwrite":
        before = make_job(root, num_rows=6, sampling={"seed": 2}, output={"path": "before", "shard_rows": 3})
    run_job(before, services=FakeWorld().services)
    for kill_at in count(0, step):
        job = small(root, f"out-{kill_at}")
        shutil.copytree(before.output_dir, job.output_dir)
        ended = server.run(Run.of(job, command=command, kill_at=kill_at))
        assert ended in (0, -signal.SIGKILL)
        assert server.run(Run.of(job, command=command)) == 0
        # There is nothing to do; what is left of the journal goes.
        assert server.run(Run.of(job)) == 0
        check_output(FILES, job.output_dir, expected)
        if ended == 0:
            return


@pytest.mark.parametrize("command", ["rerun", "overwrite"])
def test_a_rerun_or_an_overwrite_may_be_killed(
    memory_dir: Path, server: CrashServer, command: Literal["rerun", "overwrite"]
) -> None:
    check_redone(memory_dir, server, command, step=17)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["rerun", "overwrite"])
def test_a_rerun_or_an_overwrite_may_be_killed_at_every_file_operation(
    memory_dir: Path, server: CrashServer, command: Literal["rerun", "overwrite"]
) -> None:
    check_redone(memory_dir, server, command, step=1)


def killed_at_random(root: Path, server: CrashServer, killed: Killed, num_kills: int) -> None:
    has_child = killed != "process"
    save(byte_level(), root / "model", bos=False)

    def run_of(path: str) -> Run:
        job = make_job(root, num_rows=60, output={"path": path, "shard_rows": 7})
        return Run.of(job, step_seconds=0.003 if has_child else 0.001, has_child=has_child)

    kill_at_random(server, run_of, killed, num_kills)


@pytest.mark.case(56)
@pytest.mark.parametrize(("killed", "num_kills"), [("process", 20), ("main", 2)])
def test_kills_at_random_moments_lose_nothing(
    memory_dir: Path, server: CrashServer, killed: Killed, num_kills: int
) -> None:
    killed_at_random(memory_dir, server, killed, num_kills)


@pytest.mark.slow
@pytest.mark.parametrize("killed", get_args(Killed))
def test_two_hundred_kills_at_random_moments_lose_nothing(
    memory_dir: Path, server: CrashServer, killed: Killed
) -> None:
    killed_at_random(memory_dir, server, killed, num_kills=200)


WRITES = ("write", "sync")
NAMES = ("create", "link", "rename", "unlink", "make_directory")


def may_fail(kind: str, path: Path) -> bool:
    """What a run goes on without: its figures, and the removal of the files that its probe of the file system made."""
    return path.parent.name == "metrics" or (kind == "unlink" and "-probe" in path.name)


def check_failures(
    root: Path, server: CrashServer, code: int, is_sticky: bool, step: int, kinds: tuple[str, ...] = WRITES
) -> None:
    """The N-th operation of these kinds fails: the run ends with 74 and the next one with everything."""
    expected = undisturbed(root, small(root))
    operations: list[tuple[str, Path]] = []
    job = small(root, "counted")
    counting = CountingBackend(lambda kind, path: operations.append((kind, path)) if kind in kinds else None)
    run_job(job, services=FakeWorld(backend=counting).services)
    needed = [at for at, (kind, path) in enumerate(operations) if not may_fail(kind, path)]
    for fail_at in needed[::step]:
        job = small(root, f"out-{fail_at}")
        failing = Run.of(job, fail_at=fail_at, fail_errno=code, is_sticky=is_sticky, fail_kinds=kinds)
        assert server.run(failing) == 74, operations[fail_at]
        assert server.run(Run.of(job)) == 0
        check_output(FILES, job.output_dir, expected)


@pytest.mark.parametrize("is_sticky", [False, True], ids=["once", "sticky"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_failing_writes_and_syncs_end_with_74_and_lose_nothing(
    memory_dir: Path, server: CrashServer, code: int, is_sticky: bool
) -> None:
    check_failures(memory_dir, server, code, is_sticky, step=11)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [WRITES, NAMES], ids=["writes", "names"])
@pytest.mark.parametrize("is_sticky", [False, True], ids=["once", "sticky"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_every_file_operation_may_fail(
    memory_dir: Path, server: CrashServer, code: int, is_sticky: bool, kinds: tuple[str, ...]
) -> None:
    check_failures(memory_dir, server, code, is_sticky, step=1, kinds=kinds)


class _OnceFailed:
    """A file whose sync fails: whoever touches it again, as if it could still be trusted, is found out."""

    def __init__(self, file: WritableFile) -> None:
        self._file = file
        self.close = file.close
        self.num_uses_after = 0
        self._has_failed = False

    def write(self, data: bytes) -> None:
        self.num_uses_after += self._has_failed
        self._file.write(data)

    def sync(self) -> None:
        self.num_uses_after += self._has_failed
        self._has_failed = True
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("part", ["plan.json", "part-00001", "00000001.json", "-000001.log"])
def test_a_file_whose_sync_failed_is_never_synced_again(tmp_path: Path, part: str) -> None:
    failed: list[_OnceFailed] = []

    class Backend(OsBackend):
        def create(self, path: Path) -> WritableFile:
            file = super().create(path)
            if part not in path.name or failed:
                return file
            failed.append(_OnceFailed(file))
            return failed[0]

    job = small(tmp_path)
    backend = Backend()
    with pytest.raises(OutputUnavailable, match=f"{part}.*cannot sync"):
        run_job(job, services=FakeWorld(backend=backend).services)
    run_job(job, services=FakeWorld(backend=backend).services)
    assert failed[0].num_uses_after == 0
    check_output(FILES, job.output_dir, undisturbed(tmp_path, job))


def check_open_files(root: Path, server: CrashServer, numbers: range, has_child: bool) -> None:
    """With too few descriptors a run ends with 74, whichever file it cannot open; with enough it goes on."""
    save(byte_level(), root / "model", bos=False)
    calm = small(root, "calm")
    assert server.run(Run.of(calm, has_child=has_child)) == 0
    codes = []
    for num_more in numbers:
        job = small(root, f"out-{num_more}")
        codes.append(server.run(Run.of(job, max_open_files=num_more, has_child=has_child)))
        assert server.run(Run.of(job, has_child=has_child)) == 0
        check_output(FILES, job.output_dir, rows_of(calm))
    assert codes == sorted(codes, reverse=True)
    assert set(codes) == {74, 0}


def test_too_many_open_files_end_with_74(memory_dir: Path, server: CrashServer) -> None:
    check_open_files(memory_dir, server, range(10), has_child=False)


@pytest.mark.slow
def test_too_many_open_files_end_with_74_where_a_child_makes_the_prompts(memory_dir: Path, server: CrashServer) -> None:
    check_open_files(memory_dir, server, range(24), has_child=True)


@pytest.mark.case(45)
@pytest.mark.parametrize("num_runs", [2, 10])
def test_of_many_runs_at_once_exactly_one_works(memory_dir: Path, server: CrashServer, num_runs: int) -> None:
    job = make_job(memory_dir, num_rows=30)
    pids = [server.start(Run.of(job, step_seconds=0.01)) for _ in range(num_runs)]
    codes = [server.wait(pid) for pid in pids]
    assert sorted(codes) == [0] + [4] * (num_runs - 1)
    check_output(FILES, job.output_dir, undisturbed(memory_dir, job))


def test_runs_that_wait_for_the_lock_end_well(memory_dir: Path, server: CrashServer) -> None:
    job = make_job(memory_dir, num_rows=10)
    pids = [server.start(Run.of(job, step_seconds=0.002, wait_seconds=60.0)) for _ in range(3)]
    assert [server.wait(pid) for pid in pids] == [0, 0, 0]
    check_output(FILES, job.output_dir, undisturbed(memory_dir, job))


def test_a_stopped_holder_keeps_its_lock_and_completes_when_it_goes_on(memory_dir: Path, server: CrashServer) -> None:
    job = make_job(memory_dir, num_rows=30)
    first = server.start(Run.of(job, step_seconds=0.01))
    wait_for(job.output_dir / "_batchgen" / "commits" / "00000000.json")
    os.kill(first, signal.SIGSTOP)
    assert server.run(Run.of(job)) == 4
    os.kill(first, signal.SIGCONT)
    assert server.wait(first) == 0
    check_output(FILES, job.output_dir, undisturbed(memory_dir, job))


def wait_for(path: Path) -> None:
    """Wait until a file is there, at most a minute."""
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.case(56)
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_with_75_and_the_next_run_goes_on(memory_dir: Path, server: CrashServer, number: int) -> None:
    job = make_job(memory_dir, num_rows=30, run={"journal_interval": 3600})
    pid = server.start(Run.of(job, step_seconds=0.005))
    wait_for(job.output_dir / "_batchgen" / "commits" / "00000000.json")
    os.kill(pid, number)
    assert server.wait(pid) == 75
    assert FILES.list_directory(job.output_dir / "_batchgen" / "journal") != []
    assert server.run(Run.of(job)) == 0
    check_output(FILES, job.output_dir, undisturbed(memory_dir, job))
