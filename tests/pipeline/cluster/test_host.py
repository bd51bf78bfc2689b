"""The engine's thread of a worker: what the machine refuses ends a run with 74, and a run that is over ends nothing."""

from __future__ import annotations

import errno
import os
import queue
import shutil
import sys
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from batchgen.config import JobConfig
from batchgen.data.file_backend import OsBackend
from batchgen.data.files import OutputFiles
from batchgen.data.layout import OutputPaths
from batchgen.errors import OutputUnavailable
from batchgen.pipeline.cluster.host import EngineHost, Place
from batchgen.pipeline.cluster.messages import Beat, Done, Failed, LoadOrder, Message, Task, WorkOrder, error_of
from batchgen.pipeline.plan import plan_shards
from batchgen.pipeline.ports import Services
from batchgen.pipeline.runner import run_job
from batchgen.pipeline.session import RUN_SCOPE, OpenOptions, Session, Watcher, open_session
from tests.pipeline.cluster.running import Watching, calm, check, job_of
from tests.pipeline.fakes import FakeEngine
from tests.pipeline.mounts import SmallDisk
from tests.pipeline.worker_fakes import services


def refuse() -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/cache/kernel")


def refused_at_load() -> Services:
    def make_engine(job: JobConfig, directory: Path) -> FakeEngine:
        refuse()
        return FakeEngine()

    return replace(services(), make_engine=make_engine)


def refused_at_a_step() -> Services:
    return replace(services(), make_engine=lambda job, directory: FakeEngine(on_step=refuse))


class NextRunComes(OsBackend):
    """As a file of the worker's is read back, the next run of the output has the lock and has removed the file."""

    def open_read(self, path: Path) -> BinaryIO:
        if path.suffix == ".parquet":
            lock = OutputPaths(path.parents[2]).lock
            lock.write_text(lock.read_text().replace('"attempt": "', '"attempt": "not '))
            path.unlink()
        return super().open_read(path)


def overtaken() -> Services:
    return replace(services(), files=OutputFiles(NextRunComes()))


class Messages:
    """What a host says."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.put = self._queue.put

    def wait_for(self, kind: type[Any] | tuple[type[Any], ...], state: str | None = None, seconds: float = 20.0) -> Any:
        while True:
            message = self._queue.get(timeout=seconds)
            if isinstance(message, kind) and state in (None, getattr(message, "state", None)):
                return message


def load_order(session: Session, make_services: Any) -> LoadOrder:
    ledger = session.ledger
    return LoadOrder(ledger.attempt, "topic", session.job, session.model.hashes, ledger.paths.root, make_services, 60.0)


def work_order(session: Session) -> WorkOrder:
    assert session.plan is not None
    schema, plan = session.layout.source_schema, session.plan
    return WorkOrder(1, session.job, session.scan, schema, plan.fingerprint, RUN_SCOPE, plan.started)


def host_of(session: Session, make_services: Any, messages: Messages) -> EngineHost:
    return EngineHost(load_order(session, make_services), "w", Place("n", "tcp://1"), messages.put)


def submit_first_shard(host: EngineHost, session: Session, messages: Messages) -> threading.Event:
    session.begin(messages.wait_for(Beat, "ready").facts["resolved"])
    host.accept(work_order(session))
    (shard, *_) = plan_shards(session.expected, 7, 0, session.index)
    return host.submit(Task(0, 1, shard.number, shard.ranges, True, (), ()))


@pytest.mark.parametrize("make_services", [refused_at_load, refused_at_a_step])
def test_too_many_open_files_of_a_worker_are_the_machines_fault(tmp_path: Path, make_services: Any) -> None:
    messages = Messages()
    with ExitStack() as stack:
        session = open_session(job_of(tmp_path, "out", 2), services(), Watcher(None), stack, OpenOptions())
        host = host_of(session, make_services, messages)
        if make_services is refused_at_a_step:
            submit_first_shard(host, session, messages)
        failure = messages.wait_for(Failed)
        assert host.wait_until_left(20)
    assert not failure.is_refusal
    error = error_of(failure)
    assert isinstance(error, OutputUnavailable)
    assert error.exit_code == 74
    assert str(error).startswith("/cache/kernel: Too many open files; raise the limit of open files")


def test_a_shard_that_the_next_run_has_removed_ends_nothing_but_the_work_on_it(tmp_path: Path) -> None:
    messages = Messages()
    with ExitStack() as stack:
        session = open_session(job_of(tmp_path, "out", 2), services(), Watcher(None), stack, OpenOptions())
        host = host_of(session, overtaken, messages)
        done = submit_first_shard(host, session, messages)
        assert done.wait(20)
        assert host.wait_until_left(20)
    with pytest.raises(queue.Empty):
        messages.wait_for((Failed, Done), seconds=0.0)


@pytest.mark.slow
def test_a_disk_that_workers_fill_ends_the_run_and_a_freed_one_lets_it_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.02")
    expected = calm(tmp_path)
    (tmp_path / "mnt").mkdir()
    with SmallDisk(tmp_path / "mnt", size=1 << 20) as disk:
        job = job_of(tmp_path, str(disk.path / "out"), 2)
        filler = disk.path / "filler"

        def on_update(snapshot: Any) -> None:
            if snapshot.workers and not filler.exists():
                filler.write_bytes(bytes(shutil.disk_usage(disk.path).free))

        with pytest.raises(OutputUnavailable, match=r"/out/.*: No space left on device; free some space") as error:
            run_job(job, services=services(), progress=Watching(on_update))
        assert error.value.exit_code == 74
        filler.unlink()
        run_job(job, services=services())
        check(job, expected)
