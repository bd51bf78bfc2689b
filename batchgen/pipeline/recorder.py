"""Keeps a run's progress as points in time, for `report` and `watch`: a Progress like any other."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict

from batchgen.data.metrics_log import MetricsLog
from batchgen.pipeline.progress import ProgressSnapshot

MIN_SECONDS = 1.0
"""Between two points, at first."""
SHARE = 1 / 500
"""Of the time so far, between two points: an hour has about 1,500 points, a month 4,800."""


class Recorder:
    """Writes a snapshot to the metrics log as often as charts need it."""

    def __init__(self, log: MetricsLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._started: float | None = None
        self._next = 0.0
        self._last: ProgressSnapshot | None = None

    def phase(self, name: str) -> None:
        """Nothing to keep."""

    def message(self, text: str) -> None:
        """Nothing to keep."""

    def update(self, snapshot: ProgressSnapshot) -> None:
        """Write it if the last point is old enough, and keep it for the end otherwise; the first call is second 0."""
        self._last = snapshot
        if self._started is None:
            self._started = self._clock()
        if self._clock() - self._started >= self._next:
            self._write()

    def close(self) -> None:
        """Write the last snapshot, unless it is written."""
        self._write()

    def _write(self) -> None:
        snapshot, self._last = self._last, None
        if snapshot is None or self._started is None:
            return
        seconds = self._clock() - self._started
        self._next = seconds + max(MIN_SECONDS, seconds * SHARE)
        values = {name: round(v, 4) if isinstance(v, float) else v for name, v in asdict(snapshot).items()}
        self._log.add("point", {"at": round(time.time(), 3), "seconds": round(seconds, 3), **values})
