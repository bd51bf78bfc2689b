"""kill -9 of workers, schedulers and clients at random moments: no row is lost, doubled or changed, nothing stays."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from batchgen.config import JobConfig
from batchgen.errors import Interrupted
from batchgen.pipeline.runner import run_job
from tests.pipeline.cluster.remote import remote
from tests.pipeline.cluster.running import (
    Watching,
    calm,
    check,
    children,
    job_of,
    kill,
    num_open_files,
    pids,
    start,
    wait_until,
)
from tests.pipeline.crash_server import CrashServer, Run
from tests.pipeline.kills import is_alive
from tests.pipeline.worker_fakes import services

pytestmark = pytest.mark.usefixtures("importable")


@pytest.fixture(autouse=True)
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs last long enough for something to be killed."""
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.02")


@contextmanager
def beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `work` in a thread while the body runs; its event is set when the body ends."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=[over])
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.case(49)
def test_a_killed_client_and_a_killed_worker_cost_no_row(tmp_path: Path) -> None:
    expected = calm(tmp_path)
    with remote(tmp_path) as cluster:
        job = job_of(tmp_path, "out", 2, scheduler=cluster.address)
        client = start(job)
        wait_until(lambda: any((job.output_dir / "_batchgen" / "journal").glob("*.log")))
        client.kill()
        client.wait()
        victims: list[int] = []

        def on_update(snapshot: Any) -> None:
            if snapshot.workers and not victims:
                victims.append(cluster.workers[0])
                kill(victims[0])

        run_job(job, services=services(), progress=Watching(on_update))
        assert len(victims) == 1
    check(job, expected)


@pytest.mark.case(49)
@pytest.mark.slow
def test_fifty_killed_workers(tmp_path: Path) -> None:
    kill_workers(tmp_path, kills=50)


def kill_workers(root: Path, kills: int) -> None:
    """Kill workers while jobs run, busy ones and such as are starting; each job goes on to its end.

    Never the last one that is ready before another is: three workers in a row that never come up end a run.
    A row is given up where three deaths in a row hit it, the last of them alone: a shard takes half a second and the
    deaths are seconds apart and choose among two workers, so that the same row is hit four times in a row is less
    likely than one in 10,000 for all the kills.
    """
    chance = random.Random(kills)
    num_rows = 600
    expected = calm(root, num_rows=num_rows)
    done: list[int] = []

    has_ready = threading.Event()

    def on_update(snapshot: Any) -> None:
        (has_ready.set if snapshot.workers else has_ready.clear)()

    def kill_some(over: threading.Event) -> None:
        while len(done) < kills and not over.wait(chance.uniform(0.0, 3.0)):
            found = pids("worker") if has_ready.is_set() else []
            if found:
                done.append(chance.choice(found))
                with suppress(ProcessLookupError):
                    kill(done[-1])

    for number in count():
        job = job_of(root, f"out{number}", 2, num_rows=num_rows)
        with beside(kill_some):
            run_job(job, services=services(), progress=Watching(on_update))
        check(job, expected)
        assert not any(is_alive(pid) for pid in done)
        if len(done) >= kills:
            return


@pytest.mark.case(55)
@pytest.mark.slow
def test_fifty_killed_schedulers(tmp_path: Path) -> None:
    """Each ends the run with 75 in bounded time, and the next run goes on from there."""
    chance = random.Random(2)
    expected = calm(tmp_path)
    kills = 0
    for number in count():
        job = job_of(tmp_path, f"out{number}", 2)
        is_over = False
        while not is_over:
            killed_at: list[float] = []

            def kill_one(over: threading.Event, job: JobConfig = job, killed_at: list[float] = killed_at) -> None:
                wait_for_moment(chance, job, over.is_set)
                for pid in pids("scheduler"):
                    killed_at.append(time.monotonic())
                    kill(pid)

            with beside(kill_one):
                try:
                    run_job(job, services=services())
                    is_over = True
                except Interrupted:
                    assert time.monotonic() - killed_at[0] < 30
                    kills += 1
            assert children() == {}
        check(job, expected)
        if kills >= 50:
            return


def wait_for_moment(chance: random.Random, job: JobConfig, is_over: Callable[[], bool]) -> None:
    """A random moment, half of the time while workers are at work, however slow the machine is to start them."""
    end = time.monotonic()
    if chance.random() < 0.5:
        end += chance.uniform(0.0, 4.0)
    else:
        journal = job.output_dir / "_batchgen" / "journal"
        known = set(journal.glob("*.log"))
        while not is_over() and set(journal.glob("*.log")) <= known:
            time.sleep(0.01)
        end = time.monotonic() + chance.uniform(0.0, 1.0)
    while not is_over() and time.monotonic() < end:
        time.sleep(0.01)


@pytest.mark.slow
def test_killed_clients_and_all_that_they_started(tmp_path: Path) -> None:
    with CrashServer(tmp_path / "log", has_workers=True) as server:
        kill_clients(tmp_path, server, kills=20)


@pytest.mark.slow
def test_fifty_killed_clients_of_a_cluster_that_stays(tmp_path: Path) -> None:
    with remote(tmp_path) as cluster, CrashServer(tmp_path / "log", has_workers=True) as server:
        kill_clients(tmp_path, server, kills=5, scheduler=cluster.address)
        workers = cluster.workers
        files = [num_open_files(pid) for pid in cluster.family]
        kill_clients(tmp_path / "more", server, kills=50, scheduler=cluster.address)
        # The same processes as before, with no file more than a run may have open for a moment.
        assert cluster.workers == workers, cluster.log.read_text()
        assert all(num_open_files(pid) <= held + 4 for pid, held in zip(cluster.family, files, strict=True))


def kill_clients(root: Path, server: CrashServer, kills: int, **run: str) -> None:
    """Kill one client after another; the next one goes on where the last one ended, and nothing outlives them."""
    root.mkdir(exist_ok=True)
    chance = random.Random(kills)
    expected = calm(root)
    done = 0
    for number in count():
        job = job_of(root, f"out{number}", 2, **run)
        client = Run.of(job, has_workers=True)
        status = -1
        while status != 0:
            pid = server.start(client)
            if done < kills:
                wait_for_moment(chance, job, lambda pid=pid: not is_alive(pid))  # type: ignore[misc]
                family = children(pid)
                if is_alive(pid):
                    kill(pid)
                wait_until(lambda family=family: not any(is_alive(each) for each in family), 30)  # type: ignore[misc]
            status = server.wait(pid)
            assert status in (0, -signal.SIGKILL)
            done += status != 0
        check(job, expected)
        if done >= kills:
            return
