"""What the runs of an output noted over time, as the series that charts show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from batchgen.data.metrics_log import RunMetrics

MAX_POINTS = 240
"""Of one line in a chart."""

Line = list[tuple[float, float | None]]
"""(seconds at work, value); None parts two runs."""


class Interval(NamedTuple):
    """Two moments of one run, and when the later one was, in seconds at work since the first run began."""

    at: float
    seconds: float
    before: dict[str, Any]
    after: dict[str, Any]

    def gained(self, name: str) -> float:
        """How much a counter grew."""
        return float(self.after.get(name, 0) - self.before.get(name, 0))


@dataclass
class Series:
    """All lines of all runs."""

    throughput: Line = field(default_factory=list)
    """Generated tokens a second."""
    prompt_throughput: Line = field(default_factory=list)
    """Prompt tokens a second that went through the model."""
    running: Line = field(default_factory=list)
    waiting: Line = field(default_factory=list)
    kv_use: Line = field(default_factory=list)
    """Percent of the blocks."""
    cached: Line = field(default_factory=list)
    """Percent of the prompt tokens needed so far in the run that shared prefixes served."""


def series_of(runs: Sequence[RunMetrics]) -> Series:
    """Runs follow each other on one axis of time at work; what lies between two of them is left out."""
    series = Series()
    start = 0.0
    for run in runs:
        intervals = _intervals(run.points, start)
        if not intervals:
            continue
        _extend(series.throughput, intervals, lambda i: i.gained("completion_tokens") / i.seconds)
        _extend(series.prompt_throughput, intervals, _prompt_rate)
        _extend(series.running, intervals, lambda i: float(i.after.get("num_running", 0)))
        _extend(series.waiting, intervals, lambda i: float(i.after.get("num_waiting", 0)))
        _extend(series.kv_use, intervals, lambda i: 100 * float(i.after.get("kv_use", 0)))
        _extend(series.cached, intervals, _cached_share)
        start = intervals[-1].at
    return series


def _prompt_rate(interval: Interval) -> float:
    # Every drawn token but the last of a sample goes through the model once; what is computed beyond is prompts.
    return max(0.0, interval.gained("computed_tokens") - interval.gained("completion_tokens")) / interval.seconds


def _cached_share(interval: Interval) -> float:
    # Since the run began: most of the time no prompt is read at all.
    now = interval.after
    cached = float(now.get("cached_tokens", 0))
    needed = cached + max(0, now.get("computed_tokens", 0) - now.get("completion_tokens", 0))
    return 100 * cached / needed if needed > 0 else 0.0


def _intervals(points: Sequence[dict[str, Any]], start: float) -> list[Interval]:
    """Neighbouring points, or points further apart where there are more than a chart can show."""
    stride = -(-max(1, len(points) - 1) // MAX_POINTS)
    kept = [*points[:-1:stride], *points[-1:]]
    return [
        Interval(start + after["seconds"], after["seconds"] - before["seconds"], before, after)
        for before, after in pairwise(kept)
        if after["seconds"] > before["seconds"]
    ]


def _extend(line: Line, intervals: list[Interval], value: Callable[[Interval], float]) -> None:
    if line:
        line.append((intervals[0].at - intervals[0].seconds, None))
    line.extend((interval.at, value(interval)) for interval in intervals)
