"""The plan of an output, and what differs between two jobs."""

from __future__ import annotations

from batchgen.data.plan_record import PlanRecord, differences, fingerprint_of

PLAN = PlanRecord(
    fingerprint="f",
    identity={"sampling.seed": 1},
    scan={},
    job={},
    base_dir="/jobs",
    started="2026-01-01T00:00:00",
    recorded={},
    hashes={},
)


def test_a_plan_survives_its_record() -> None:
    assert PlanRecord.from_body(PLAN.to_body()) == PLAN


def test_every_field_that_differs_is_named_with_both_values() -> None:
    then = {"a": 1, "b": [1, 2], "same": None, "gone": "x"}
    now = {"a": 2, "b": [1, 2], "same": None, "new": True}
    assert differences(then, now) == [
        "a: 1 in the output, 2 in the job",
        'gone: "x" in the output, null in the job',
        "new: null in the output, true in the job",
    ]


def test_long_values_are_shortened() -> None:
    (line,) = differences({"prompt": "x" * 500}, {"prompt": "y" * 500})
    assert len(line) < 250


def test_the_fingerprint_follows_the_identity_alone() -> None:
    assert fingerprint_of({"a": 1, "b": 2}) == fingerprint_of({"b": 2, "a": 1})
    assert fingerprint_of({"a": 1}) != fingerprint_of({"a": 1.5})
