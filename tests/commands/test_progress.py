from __future__ import annotations

import io
import json
import os
import termios
from dataclasses import replace

import pytest

from batchgen.commands.progress import (
    LINE_INTERVAL,
    BarProgress,
    JsonProgress,
    LineProgress,
    duration,
    figures,
    open_progress,
)
from batchgen.pipeline.pace import Pace
from batchgen.pipeline.progress import ProgressSnapshot, WorkerProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def snapshot(
    num_done: int = 0, completion_tokens: int = 0, finished_tokens: int = 0, num_errors: int = 0
) -> ProgressSnapshot:
    return ProgressSnapshot(
        num_rows=100,
        num_done=num_done,
        num_errors=num_errors,
        completion_tokens=completion_tokens,
        finished_tokens=finished_tokens,
        num_running=8,
        num_waiting=2,
        kv_use=0.25,
    )


@pytest.mark.parametrize(("columns", "kind"), [(80, BarProgress), (0, LineProgress)])
def test_a_terminal_gets_a_bar_unless_it_has_no_width(columns: int, kind: type) -> None:
    primary, replica = os.openpty()
    termios.tcsetwinsize(replica, (24, columns))
    with open(primary, "rb"), open(replica, "w") as terminal:
        assert isinstance(open_progress(stream=terminal), kind)


def test_a_file_gets_lines() -> None:
    assert isinstance(open_progress(stream=io.StringIO()), LineProgress)


def test_rate_counts_from_the_first_snapshot() -> None:
    clock = Clock()
    rate = Pace(clock)
    rate.update(snapshot(num_done=60))
    assert rate.tokens_per_second(snapshot(60)) is None
    clock.now += 10
    assert rate.tokens_per_second(snapshot(70, completion_tokens=500)) == 50.0


def test_seconds_left_follow_from_tokens_drawn_over_rows_finished() -> None:
    clock = Clock()
    rate = Pace(clock)
    rate.update(snapshot(num_done=60))
    clock.now += 10
    # 500 tokens for 10 finished rows are 50 a row, at 50 a second; 30 rows are left.
    assert rate.seconds_left(snapshot(70, completion_tokens=500, finished_tokens=400)) == 30.0


def test_seconds_left_never_expect_more_than_a_row_may_have() -> None:
    clock = Clock()
    rate = Pace(clock)
    rate.update(snapshot())
    clock.now += 10
    # No row is finished: 100 rows of at most 20 tokens, 10 of them in flight with half of theirs, at 10 a second.
    now = replace(snapshot(completion_tokens=100), most_row_tokens=20, num_in_flight=10)
    assert rate.seconds_left(now) == (90 * 20 + 10 * 10) / 10


def test_seconds_left_are_unknown_where_nothing_is_finished_and_nothing_bounds_a_row() -> None:
    clock = Clock()
    rate = Pace(clock)
    rate.update(snapshot())
    clock.now += 1
    assert rate.seconds_left(snapshot(completion_tokens=10)) is None


def test_figures_leave_out_what_is_zero() -> None:
    rate = Pace(Clock())
    assert figures(ProgressSnapshot(num_rows=9, num_done=0, num_running=3), rate) == "3 running"
    assert figures(snapshot(), rate) == "8 running, 2 waiting, KV 25%"
    assert figures(snapshot(num_errors=3), rate) == "8 running, 2 waiting, KV 25%, 3 errors"


def test_lines_come_at_intervals_and_the_last_snapshot_always() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = LineProgress(stream, clock)
    for seconds in range(int(LINE_INTERVAL) + 5):
        progress.update(snapshot(seconds, completion_tokens=100 * seconds, finished_tokens=100 * seconds))
        clock.now += 1
    progress.close()
    progress.close()
    assert stream.getvalue().splitlines() == [
        "0/100 rows, 8 running, 2 waiting, KV 25%",
        "10/100 rows, 100 tok/s, 8 running, 2 waiting, KV 25%, 1 min 30 s left",
        "14/100 rows, 93 tok/s, 8 running, 2 waiting, KV 25%, 1 min 32 s left",
    ]


def test_phases_and_messages_are_lines() -> None:
    stream = io.StringIO()
    progress = LineProgress(stream)
    progress.phase("loading the model")
    progress.message("attention runs in Python: slow")
    progress.close()
    assert stream.getvalue() == "loading the model\nattention runs in Python: slow\n"


def test_the_bar_shows_rows_of_earlier_runs_as_done() -> None:
    stream = Terminal()
    progress = BarProgress(stream)
    progress.phase("loading the model")
    progress.update(snapshot(num_done=40))
    progress.update(snapshot(num_done=50, completion_tokens=10))
    progress.message("a line")
    progress.close()
    shown = stream.getvalue()
    assert "loading the model\n" in shown
    assert "40/100 rows" in shown
    assert "50/100 rows" in shown
    assert "8 running, 2 waiting, KV 25%" in shown
    assert "a line\n" in shown


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.21, "3.2 s"), (42, "42 s"), (80, "1 min 20 s"), (7500, "2 h 05 min"), (59.7, "1 min 00 s")]
)
def test_duration_is_written_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_prompt_tokens_and_prefix_hits_are_shown_where_there_are_any() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.update(snapshot())
    clock.now += 10
    now = replace(snapshot(10, completion_tokens=100), computed_tokens=900, cached_tokens=200)
    text = figures(now, pace)
    assert text.startswith("10 tok/s, 80 prompt tok/s, 8 running, 2 waiting, KV 25%, prefix hits 20%, ")


def test_json_lines_have_the_time_the_event_and_its_figures() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = open_progress("json", stream)
    assert isinstance(progress, JsonProgress)
    progress.clock = progress.pace.clock = clock
    progress.phase("generating")
    for seconds in range(int(LINE_INTERVAL) + 5):
        progress.update(snapshot(seconds, completion_tokens=100 * seconds))
        clock.now += 1
    progress.message("a \x1b note")
    progress.close()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["phase", "progress", "progress", "message", "progress"]
    assert lines[0]["phase"] == "generating"
    assert [line["num_done"] for line in lines if line["event"] == "progress"] == [0, 10, 14]
    assert lines[2]["tokens_per_second"] == 100.0
    assert lines[3]["text"] == "a \x1b note"
    assert "\x1b" not in stream.getvalue()
    assert all(line["time"].endswith("+00:00") for line in lines)


def test_several_workers_share_one_line_with_the_slowest_and_the_fastest() -> None:
    clock = Clock()
    rate = Pace(clock)
    rate.update(replace(snapshot(), workers=(WorkerProgress("a", 0), WorkerProgress("b", 100))))
    clock.now += 10
    later = tuple(WorkerProgress(name, tokens) for name, tokens in (("a", 400), ("b", 700), ("late", 9)))
    text = figures(replace(snapshot(10, completion_tokens=1000), workers=later), rate)
    assert "100 tok/s, 3 workers (40-60 tok/s each)" in text
