from __future__ import annotations

from typing import Any

from batchgen.data.metrics_log import RunMetrics
from batchgen.report.series import MAX_POINTS, series_of


def point(seconds: float, tokens: int, computed: int, cached: int = 0) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "completion_tokens": tokens,
        "computed_tokens": computed,
        "cached_tokens": cached,
        "num_running": tokens // 10,
        "kv_use": 0.25,
    }


def test_rates_are_gains_over_the_time_between_two_points() -> None:
    run = RunMetrics("a", points=[point(0, 0, 0), point(2, 100, 300, 100), point(4, 300, 500, 100)])
    series = series_of([run])
    assert series.throughput == [(2.0, 50.0), (4.0, 100.0)]
    assert series.prompt_throughput == [(2.0, 100.0), (4.0, 0.0)]
    assert series.running == [(2.0, 10.0), (4.0, 30.0)]
    assert series.kv_use == [(2.0, 25.0), (4.0, 25.0)]
    assert [share for _, share in series.cached] == [100 * 100 / 300, 100 * 100 / 300]


def test_runs_follow_each_other_with_a_gap() -> None:
    first = RunMetrics("a", points=[point(0, 0, 0), point(2, 100, 100)])
    killed_at_once = RunMetrics("b", points=[point(0, 0, 0)])
    last = RunMetrics("c", points=[point(0, 0, 0), point(1, 10, 10)])
    assert series_of([first, killed_at_once, last]).throughput == [(2.0, 50.0), (2.0, None), (3.0, 10.0)]


def test_a_long_run_is_thinned_and_its_last_point_is_kept() -> None:
    run = RunMetrics("a", points=[point(second, 7 * second, 7 * second) for second in range(5001)])
    line = series_of([run]).throughput
    assert len(line) <= MAX_POINTS + 1
    assert line[-1][0] == 5000.0
    assert {rate for _, rate in line} == {7.0}


def test_nothing_noted_is_no_line() -> None:
    assert series_of([RunMetrics("a")]).throughput == []
