"""The processes of a cluster on this machine: started as new interpreters, watched, replaced, and ended."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from batchgen.errors import BatchgenError, Interrupted
from batchgen.pipeline.cluster.placement import Placement
from batchgen.pipeline.cluster.worker_process import LEFT, WorkerOptions

_START_SECONDS = 60.0


class SchedulerProcess:
    """dask's scheduler on a free port of loopback."""

    def __init__(self, *, with_dashboard: bool = False) -> None:
        """Start it and wait for its address; BatchgenError where it does not, Interrupted where it is killed."""
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "batchgen.pipeline.cluster.scheduler_process"),
                *(str(os.getpid()), "dashboard" if with_dashboard else "plain"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            process_group=0,
        )
        try:
            self.address = self._read_address()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def check(self) -> None:
        """Raise Interrupted where the process has ended: workers are lost with it, rows are not."""
        status = self._process.poll()
        if status is not None:
            raise Interrupted(
                f"the scheduler process ended with status {status}; what is committed and journaled stays, and the "
                "same command goes on from here"
            )

    def close(self) -> None:
        """End it; a second call does nothing."""
        end_process(self._process)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read_address(self) -> str:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            has_news = bool(selector.select(_START_SECONDS))
            line = self._process.stdout.readline() if has_news else b""
        if not line:
            if has_news and self._process.wait() < 0:
                # Killed, which says nothing against the next one.
                self.check()
            raise BatchgenError("the scheduler process does not come up; see the lines above")
        return str(json.loads(line)["address"])


@dataclass
class _Running:
    process: subprocess.Popen[bytes]
    place: int


class WorkerPool:
    """Worker processes on this machine, one per placement; those that die are replaced."""

    def __init__(
        self,
        scheduler: str,
        placements: Sequence[Placement],
        prefix: str,
        tls: dict[str, str] | None = None,
    ) -> None:
        """`prefix`: of the workers' names, no two of which are equal."""
        self._scheduler = scheduler
        self._placements = placements
        self._prefix = prefix
        self._tls = tls
        self._running: dict[str, _Running] = {}
        self._num_started = 0
        for place in range(len(placements)):
            self._start(place)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name."""
        return {name: each.process.pid for name, each in self._running.items()}

    def kill(self, name: str) -> None:
        """End a worker that does not answer; `poll` replaces it."""
        if name in self._running:
            self._running[name].process.kill()

    def poll(self, *, replace: bool = True) -> dict[str, int]:
        """Names and exit statuses of the workers that ended since the last call.

        One that was asked to leave is not replaced.
        """
        ended = {name: status for name, each in self._running.items() if (status := each.process.poll()) is not None}
        for name, status in ended.items():
            place = self._running.pop(name).place
            if replace and status != LEFT:
                self._start(place)
        return ended

    def terminate(self) -> None:
        """Ask all to leave in good order."""
        for each in self._running.values():
            each.process.terminate()

    def close(self) -> None:
        """End all that are left."""
        for each in self._running.values():
            each.process.kill()
        for each in self._running.values():
            each.process.wait()
        self._running.clear()

    def _start(self, place: int) -> None:
        placement = self._placements[place]
        name = f"{self._prefix}{place}-{self._num_started}"
        self._num_started += 1
        options = WorkerOptions(
            scheduler=self._scheduler,
            name=name,
            parent=os.getpid(),
            cores=placement.cores,
            memory_share=placement.memory_share,
            tls=self._tls,
        )
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "batchgen.pipeline.cluster.worker_process", options.to_text()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, **placement.environ},
            # Not in the terminal's foreground: Ctrl-C is the parent's to handle.
            process_group=0,
        )
        self._running[name] = _Running(process, place)


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Kill and reap."""
    process.kill()
    process.wait()
