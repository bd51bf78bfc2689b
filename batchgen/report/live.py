"""Where a run stands now, from the files of its output alone: it may run on another machine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from batchgen.data.metrics_log import RunMetrics, read_metrics
from batchgen.pipeline.pace import Pace
from batchgen.pipeline.progress import ProgressSnapshot
from batchgen.pipeline.status import Status, status
from batchgen.pipeline.stored import StoredOutput

SILENT_SECONDS = 15.0
"""A run at work notes something every second at first; and ever less often, see `Recorder`."""
SILENT_SHARE = 0.02
"""Of the time at work so far, for how long a long run may be silent."""
_SNAPSHOT_FIELDS = {field.name for field in fields(ProgressSnapshot)}


@dataclass(frozen=True)
class Live:
    """A look at an output."""

    status: Status
    run: RunMetrics | None
    """The run that holds the lock, if it has noted anything; else the latest that has."""
    snapshot: ProgressSnapshot | None
    """What it noted last."""
    tokens_per_second: float | None
    """Over the last minute that it noted."""
    prompt_tokens_per_second: float
    seconds_left: float | None
    now: float
    """Seconds since 1970."""

    @property
    def silent_seconds(self) -> float | None:
        """Since the latest run noted anything; None where none has."""
        return max(0.0, self.now - self.run.points[-1]["at"]) if self.run and self.run.points else None

    @property
    def is_at_work(self) -> bool:
        """Whether a run seems to be at work: it noted something lately and no end, or it holds the lock."""
        if self.status.holder is not None:
            return True
        if self.run is None or self.run.end or self.silent_seconds is None:
            return False
        return self.silent_seconds < SILENT_SECONDS + SILENT_SHARE * float(self.run.points[-1]["seconds"])

    @property
    def host(self) -> str:
        """Where the latest run is, or was, at work; empty where nobody has said."""
        if self.status.holder is not None:
            return self.status.holder.host
        return "" if self.run is None else str(self.run.run.get("host", ""))

    @property
    def num_done(self) -> int:
        """Rows that are finished, committed or not."""
        noted = self.snapshot.num_done if self.snapshot is not None and self.is_at_work else 0
        return max(noted, self.status.num_committed)

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "status": self.status.to_json(),
            "at_work": self.is_at_work,
            "host": self.host,
            "silent_seconds": self.silent_seconds,
            "rows_done": self.num_done,
            "tokens_per_second": self.tokens_per_second,
            "prompt_tokens_per_second": self.prompt_tokens_per_second,
            "seconds_left": self.seconds_left,
            "last": {} if self.run is None or not self.run.points else self.run.points[-1],
        }


def look(stored: StoredOutput, clock: float | None = None) -> Live:
    """Read what is there now; takes no lock. `clock` is the time in seconds since 1970."""
    found = status(stored)
    run = _latest(stored, found)
    snapshot: ProgressSnapshot | None = None
    moment = 0.0
    pace = Pace(lambda: moment)
    for point in () if run is None else run.points:
        snapshot, moment = _snapshot(point), float(point["seconds"])
        pace.update(snapshot)
    speed = None if snapshot is None else pace.tokens_per_second(snapshot)
    return Live(
        status=found,
        run=run,
        snapshot=snapshot,
        tokens_per_second=speed,
        prompt_tokens_per_second=0.0 if snapshot is None else pace.prompt_tokens_per_second(snapshot),
        seconds_left=None if snapshot is None else pace.seconds_left(snapshot),
        now=time.time() if clock is None else clock,
    )


def _latest(stored: StoredOutput, found: Status) -> RunMetrics | None:
    """What the run at work has noted, or else the latest one that noted anything."""
    runs = [run for run in read_metrics(stored.files, stored.paths.metrics) if run.points]
    if found.holder is not None:
        # Where it has noted nothing yet, or the clock was put back, the last in order is another one.
        runs = [run for run in runs if run.attempt == found.holder.attempt]
    return runs[-1] if runs else None


def _snapshot(point: Mapping[str, Any]) -> ProgressSnapshot:
    # A later release may note more, and an older one less.
    return ProgressSnapshot(**{name: value for name, value in point.items() if name in _SNAPSHOT_FIELDS})
