"""Workers of this machine for a cluster that is there already: what `batchgen worker` does."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

from batchgen.config import EngineConfig, TlsConfig
from batchgen.errors import BatchgenError, Interrupted
from batchgen.pipeline.cluster.placement import num_workers, place, this_machine
from batchgen.pipeline.cluster.processes import WorkerPool
from batchgen.pipeline.cluster.settings import scheduler_address, security_for
from batchgen.pipeline.cluster.worker_process import FAILED, LEAVE_SECONDS
from batchgen.pipeline.stop import StopWatch

MAX_FAILURES = 3
"""Starts of a worker that may fail one after another; each has waited a minute for the scheduler."""
_POLL_SECONDS = 0.2


def serve_cluster(
    scheduler: str, count: int | str, engine: EngineConfig, tls: TlsConfig | None, report: Callable[[str], None]
) -> None:
    """Keep workers running until a signal asks to leave; those that die are replaced.

    Raises JobError for an address that must not be used, Interrupted where the scheduler does not answer any more.
    """
    here = Path.cwd()
    address = scheduler_address(scheduler, here)
    security_for(address, tls, here)
    machine = this_machine()
    placements = place(num_workers(count, engine, machine), engine, machine)
    files = None if tls is None else {name: str((here / path).absolute()) for name, path in tls.model_dump().items()}
    with StopWatch(None, LEAVE_SECONDS + 5) as stop:
        pool = WorkerPool(address, placements, f"{platform.node()}-{os.getpid()}-", files)
        try:
            report(f"{len(placements)} workers for {address}")
            _watch(pool, stop, len(placements), report)
        finally:
            pool.close()


def _watch(pool: WorkerPool, stop: StopWatch, count: int, report: Callable[[str], None]) -> None:
    failures = 0
    while stop.reason is None and pool.pids:
        for name, status in pool.poll().items():
            report(f"worker {name} ended with status {status}")
            failures = failures + 1 if status == FAILED else 0
        if failures >= MAX_FAILURES * count:
            raise Interrupted("workers cannot be started, or the scheduler does not answer; see the lines above")
        time.sleep(_POLL_SECONDS)
    if stop.reason is not None:
        report(f"{stop.reason}: handing back")
    deadline = time.monotonic() + LEAVE_SECONDS
    while pool.pids and time.monotonic() < deadline:
        # Again and again: a process that has just been started does not listen yet.
        pool.terminate()
        pool.poll(replace=False)
        time.sleep(_POLL_SECONDS)
    if pool.pids:
        raise BatchgenError(f"workers {', '.join(pool.pids)} did not hand back in time, and are ended")
