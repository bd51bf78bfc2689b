"""A cluster that is there before the jobs and stays after them: a scheduler, and `batchgen worker` beside it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from batchgen.pipeline.cluster.processes import SchedulerProcess, end_process
from tests.pipeline.cluster.running import children, kill, pids
from tests.program import PROGRAM, ROOT


@dataclass
class Remote:
    """Processes of the cluster; none of them is a child of a run."""

    address: str
    scheduler: int
    joined: subprocess.Popen[bytes]
    """`batchgen worker`, whose children the workers are."""
    log: Path

    @property
    def workers(self) -> list[int]:
        """Process ids of the workers that live."""
        return pids("worker", self.joined.pid)

    @property
    def family(self) -> list[int]:
        """All processes."""
        return [self.scheduler, self.joined.pid, *children(self.joined.pid)]


@contextmanager
def remote(root: Path, workers: int = 2, step_seconds: float = 0.02) -> Iterator[Remote]:
    """A scheduler and workers on loopback. At the end the workers are asked to leave, and must do so."""
    scheduler = SchedulerProcess()
    try:
        with joined(root, scheduler.address, workers, step_seconds) as process:
            yield Remote(scheduler.address, scheduler.pid, process, root / "workers.log")
    finally:
        scheduler.close()


@contextmanager
def joined(
    root: Path, address: str, workers: int, step_seconds: float, options: tuple[str, ...] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """`batchgen worker` for a scheduler."""
    command = [*PROGRAM, "worker", "--scheduler", address, "--workers", str(workers)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "FAKE_STEP_SECONDS": str(step_seconds)}
    with (root / "workers.log").open("ab") as log:
        process = subprocess.Popen(
            [*command, "--device", "cpu", *options], cwd=ROOT, env=environ, stdout=log, stderr=log
        )
    try:
        yield process
        kill(process.pid, signal.SIGTERM)
        assert process.wait(timeout=40) == 0
    finally:
        end_process(process)
