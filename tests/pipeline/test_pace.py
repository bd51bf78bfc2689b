from __future__ import annotations

from dataclasses import replace

import pytest

from batchgen.pipeline.pace import WINDOW_SECONDS, Pace
from batchgen.pipeline.progress import ProgressSnapshot


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run_of(lengths: list[int], width: int, *, max_tokens: int) -> list[tuple[float, float | None]]:
    """(seconds really left, seconds foretold) of a run of rows, `width` at a time, a token of each in a second."""
    clock = Clock()
    pace = Pace(clock)
    waiting, running = list(lengths), []
    done = finished = drawn = steps = longest = 0
    foretold: list[tuple[float, float | None]] = []
    while waiting or running:
        while waiting and len(running) < width:
            running.append([waiting.pop(0), 0])
        snapshot = ProgressSnapshot(
            num_rows=len(lengths),
            num_done=done,
            completion_tokens=drawn,
            finished_tokens=finished,
            longest_tokens=longest,
            most_row_tokens=max_tokens,
            num_in_flight=len(running),
            num_running=len(running),
            num_steps=steps,
        )
        pace.update(snapshot)
        foretold.append((clock.now, pace.seconds_left(snapshot)))
        clock.now += 1
        steps += 1
        for row in running:
            row[1] += 1
            drawn += 1
        done += sum(row[0] == row[1] for row in running)
        longest = max([longest, *(row[0] for row in running if row[0] == row[1])])
        finished += sum(row[0] for row in running if row[0] == row[1])
        running = [row for row in running if row[0] > row[1]]
    return [(clock.now - at, seconds) for at, seconds in foretold]


@pytest.mark.parametrize(
    "lengths",
    [
        [200 if row % 8 == 7 else 20 for row in range(160)],  # One row in eight runs to its limit.
        [30 + row * 37 % 40 for row in range(200)],
        [20] * 159 + [200],  # Nothing foretells the last one, until it runs alone.
    ],
    ids=["two kinds", "even", "one long row at the end"],
)
def test_the_time_left_is_told_within_a_factor_of_two_from_a_quarter_on(lengths: list[int]) -> None:
    told = run_of(lengths, 16, max_tokens=200)
    for really, foretold in told[len(told) // 4 :]:
        assert foretold is not None
        assert foretold <= 2 * really + 30
        if lengths[-1] != 200 or lengths.count(200) > 1:
            assert foretold >= 0.45 * really - 10


def test_rows_of_one_length_are_foretold_to_the_step() -> None:
    told = run_of([50] * 64, 16, max_tokens=50)
    for really, foretold in told[1:]:
        assert foretold is not None
        assert abs(foretold - really) <= 51
    assert told[-1][1] is not None
    assert told[-1][1] <= 3


def test_rates_are_those_of_the_last_minute() -> None:
    clock = Clock()
    pace = Pace(clock)
    snapshot = ProgressSnapshot(num_rows=1000, num_done=0)
    for second in range(600):
        clock.now = float(second)
        tokens = 10 * second if second < 300 else 3000 + 50 * (second - 300)
        snapshot = replace(snapshot, completion_tokens=tokens, computed_tokens=3 * tokens, num_steps=second)
        pace.update(snapshot)
    assert pace.tokens_per_second(snapshot) == 50.0
    assert pace.prompt_tokens_per_second(snapshot) == 100.0
    assert len(pace._recent) <= WINDOW_SECONDS + 2


def test_prefix_hits_are_a_share_of_what_prompts_needed() -> None:
    snapshot = ProgressSnapshot(num_rows=1, num_done=0, completion_tokens=10, computed_tokens=40, cached_tokens=70)
    assert snapshot.cached_share == 0.7
    assert ProgressSnapshot(num_rows=1, num_done=0).cached_share == 0.0
