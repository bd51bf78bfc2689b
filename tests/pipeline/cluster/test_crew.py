"""What the runner knows of its workers."""

from __future__ import annotations

from typing import Any

import pytest

from batchgen.errors import BatchgenError, InputError, OutputUnavailable
from batchgen.pipeline.cluster.crew import Crew
from batchgen.pipeline.cluster.messages import Beat, Done, Facts, HandedBack, error_of, failed, from_wire, to_wire

FACTS = Facts("local-0", "tcp://127.0.0.1:1", "host", 7, {"ids": [1, 2]}, [], {}, 4096, 128)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def beat(worker: str = "w", facts: Facts | None = FACTS, **figures: Any) -> Beat:
    return Beat(worker, FACTS.address, "ready", figures, [[3, 4, 1, 50, 60]], facts and facts._asdict())


def test_messages_arrive_as_they_were_sent() -> None:
    for message in (beat(), Done("w", 1, [1, 0, 2, 3], ["a"], None), HandedBack("w", 1)):
        wire = to_wire(message)
        wire["worker"] = "dask puts an address here"
        wire["fields"] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in message._asdict().items()
        }
        assert from_wire(wire) == message


def test_errors_keep_their_exit_code_and_nothing_else_is_made_of_them() -> None:
    for error in (InputError("a"), OutputUnavailable("b"), BatchgenError("c")):
        back = error_of(failed("w", error, is_refusal=False))
        assert (type(back), str(back)) == (type(error), str(error))
    forged = failed("w", BatchgenError("d"), is_refusal=False)._replace(error="annotations")
    assert type(error_of(forged)) is BatchgenError


@pytest.mark.case(54)
def test_a_worker_is_silent_after_its_time_and_not_before() -> None:
    clock = Clock()
    crew = Crew(10.0, clock)
    crew.take(beat())
    clock.now = 11.0
    assert crew.silent() == []
    clock.now = 12.5
    assert crew.silent() == ["w"]
    crew.take(beat(facts=None))
    assert crew.silent() == []


def test_a_worker_that_has_not_said_who_it_is_is_nobody() -> None:
    assert Crew(1.0).take(beat(facts=None)) is None


def test_figures_add_up_and_those_of_the_lost_stay() -> None:
    crew = Crew(10.0)
    crew.take(beat("a", num_drawn_tokens=5, num_running=2, peak_kv_share=0.5))
    crew.take(beat("b", FACTS._replace(kv_tokens=64), num_drawn_tokens=7, num_running=1, peak_kv_share=0.25))
    crew.members["a"].is_lost = True
    assert (crew.total("num_drawn_tokens"), crew.now("num_running"), crew.kv_tokens) == (12, 1, 64)
    assert [each.name for each in crew.progress] == ["b"]
    assert crew.figures is not None
    assert crew.figures.kv_peak == 0.5
    assert crew.members["a"].tasks[3].completion_tokens == 60
