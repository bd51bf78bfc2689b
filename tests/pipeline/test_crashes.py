"""Real processes, really killed: at every file operation, at random moments, out of space, and many at once."""

from __future__ import annotations

import errno
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from batchgen.config import JobConfig
from batchgen.data.files import OutputFiles
from batchgen.pipeline.runner import run_job
from tests.pipeline.crash_server import CrashServer, Run
from tests.pipeline.crashes import Rows, check_output, committed_rows
from tests.pipeline.fakes import FakeWorld, make_job

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


def test_a_run_may_be_killed_at_any_file_operation(memory_dir: Path, server: CrashServer) -> None:
    check_kills(memory_dir, server, first_step=4, second_step=None)


def test_a_resume_may_be_killed_too(memory_dir: Path, server: CrashServer) -> None:
    check_kills(memory_dir, server, first_step=23, second_step=19)


@pytest.mark.slow
def test_a_run_and_its_resume_may_be_killed_at_every_file_operation(memory_dir: Path, server: CrashServer) -> None:
    check_kills(memory_dir, server, first_step=1, second_step=3)


def kill_at_random(root: Path, server: CrashServer, num_kills: int, seed: int) -> None:
    """Kill a job again and again until it has had its kills; then it must end with the rows of the calm run."""
    chance = random.Random(seed)
    job = make_job(root, num_rows=60)
    expected = undisturbed(root, job)
    kills = 0
    for number in count():
        job = make_job(root, num_rows=60, output={"path": f"out-{number}", "shard_rows": 7})
        longest = 0.1
        while True:
            pid = server.start(Run.of(job, step_seconds=0.001))
            time.sleep(chance.uniform(0.0, longest))
            os.kill(pid, signal.SIGKILL)
            if server.wait(pid) == 0:
                break
            kills += 1
            # On a busy machine a run may need longer than this to begin at all.
            longest *= 1.2
        check_output(FILES, job.output_dir, expected)
        if kills >= num_kills:
            return


def test_kills_at_random_moments_lose_nothing(memory_dir: Path, server: CrashServer) -> None:
    kill_at_random(memory_dir, server, num_kills=20, seed=1)


@pytest.mark.slow
def test_two_hundred_kills_at_random_moments_lose_nothing(memory_dir: Path, server: CrashServer) -> None:
    kill_at_random(memory_dir, server, num_kills=200, seed=2)


def check_failures(root: Path, server: CrashServer, code: int, is_sticky: bool, step: int) -> None:
    """The N-th write or sync fails: the run ends with 74 and the next one with everything."""
    expected = undisturbed(root, small(root))
    for fail_at in count(0, step):
        job = small(root, f"out-{fail_at}")
        ended = server.run(Run.of(job, fail_at=fail_at, fail_errno=code, is_sticky=is_sticky))
        if ended == 0:
            return
        assert ended == 74
        assert server.run(Run.of(job)) == 0
        check_output(FILES, job.output_dir, expected)


@pytest.mark.parametrize("is_sticky", [False, True], ids=["once", "sticky"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_failing_writes_and_syncs_end_with_74_and_lose_nothing(
    memory_dir: Path, server: CrashServer, code: int, is_sticky: bool
) -> None:
    check_failures(memory_dir, server, code, is_sticky, step=11)


@pytest.mark.slow
@pytest.mark.parametrize("is_sticky", [False, True], ids=["once", "sticky"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_every_write_and_sync_may_fail(memory_dir: Path, server: CrashServer, code: int, is_sticky: bool) -> None:
    check_failures(memory_dir, server, code, is_sticky, step=1)


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_ends_with_75_and_the_next_run_goes_on(memory_dir: Path, server: CrashServer, number: int) -> None:
    job = make_job(memory_dir, num_rows=30, run={"journal_interval": 3600})
    pid = server.start(Run.of(job, step_seconds=0.005))
    wait_for(job.output_dir / "_batchgen" / "commits" / "00000000.json")
    os.kill(pid, number)
    assert server.wait(pid) == 75
    assert FILES.list_directory(job.output_dir / "_batchgen" / "journal") != []
    assert server.run(Run.of(job)) == 0
    check_output(FILES, job.output_dir, undisturbed(memory_dir, job))
