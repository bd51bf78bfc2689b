"""The ends of worker processes on this machine: which workers are gone with them, and when it is of no use to go on."""

from __future__ import annotations

import time
from collections.abc import Callable

from batchgen.errors import BatchgenError, Interrupted
from batchgen.pipeline.cluster.crew import Crew
from batchgen.pipeline.cluster.processes import WorkerPool
from batchgen.pipeline.cluster.worker_process import LEFT

MAX_DEATHS_AT_START = 3
"""Workers that die while they load, one after another and with none that is ready: it is the model or the machine."""
_DEATH_NOTICE_SECONDS = 3.0
"""The scheduler tells of a death behind the last words of the dead; after this time it need not."""


class ProcessWatch:
    """Looks after the processes of a pool, which fills their places again."""

    def __init__(self, crew: Crew, tell: Callable[[list[str]], None]) -> None:
        self._crew = crew
        self._tell = tell
        self._ended: dict[str, float] = {}
        """Processes that have ended, and when that was seen."""
        self._num_deaths_at_start = 0

    def gone(self, pool: WorkerPool) -> list[str]:
        """Workers whose processes ended a while ago.

        Raises BatchgenError where none comes up, and Interrupted where all were asked to leave.
        """
        if self._crew.living:
            self._num_deaths_at_start = 0
        now = time.monotonic()
        for name, status in pool.poll().items():
            if status != LEFT and not self._crew.knows(name):
                self._die_at_start(name, status)
            self._ended[name] = now
        late = [name for name, at in self._ended.items() if now - at > _DEATH_NOTICE_SECONDS]
        for name in late:
            del self._ended[name]
        if not pool.pids:
            raise Interrupted("every worker was asked to leave; run again to go on from here")
        return [worker for name in late for worker in self._crew.named(name)]

    def _die_at_start(self, name: str, status: int) -> None:
        self._num_deaths_at_start += 1
        self._tell([f"worker {name} ended with status {status} before it was ready; it is replaced"])
        if self._num_deaths_at_start >= MAX_DEATHS_AT_START and not self._crew.living:
            raise BatchgenError(
                f"{self._num_deaths_at_start} workers ended before they were ready, the last one with status {status}; "
                "see the lines above"
            )
