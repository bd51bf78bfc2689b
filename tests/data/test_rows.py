"""What is stored of a completion."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.data.rows import (
    FinishedRow,
    FinishedSample,
    KeptColumns,
    finished_row,
    finite,
    row_from_json,
    row_to_json,
)
from batchgen.records import Completion, RowError, Sample, TokenLogprob

SAMPLE = Sample(
    token_ids=[5, 6, 2],
    text="so",
    finish_reason="stop",
    stop_reason=2,
    cumulative_logprob=-1.5,
    seed=7,
    logprobs=[[TokenLogprob(5, -0.5, 1), TokenLogprob(6, -math.inf, 2)]],
)


def test_a_completion_keeps_its_figures() -> None:
    row = finished_row(1, 4, Completion(0, [1, 2], [SAMPLE]), KeptColumns())
    assert (row.key, row.prompt_tokens, row.completion_tokens) == ((1, 4), 2, 3)
    assert row.samples[0].stop_reason == "2"


def test_token_ids_and_logprobs_are_dropped_unless_asked_for() -> None:
    bare = finished_row(0, 0, Completion(0, [1], [SAMPLE]), KeptColumns()).samples[0]
    full = finished_row(0, 0, Completion(0, [1], [SAMPLE]), KeptColumns(True, True)).samples[0]
    assert (bare.token_ids, bare.logprobs) == (None, None)
    assert full.token_ids == [5, 6, 2]
    assert full.logprobs == [[(5, -0.5, 1), (6, None, 2)]]


@pytest.mark.case(30)
def test_infinite_figures_become_null() -> None:
    assert [finite(value) for value in (1.5, math.nan, math.inf, None)] == [1.5, None, None, None]


finite_floats = st.floats(allow_nan=False, allow_infinity=False)
samples = st.builds(
    FinishedSample,
    text=st.none() | st.text(),
    finish_reason=st.sampled_from(["stop", "length", None]),
    stop_reason=st.none() | st.text(),
    text_complete=st.booleans(),
    completion_tokens=st.integers(0, 10**6),
    seed=st.none() | st.integers(0, 2**63 - 1),
    cumulative_logprob=st.none() | finite_floats,
    score=st.none() | finite_floats,
    token_ids=st.none() | st.lists(st.integers(0, 2**31 - 1)),
    logprobs=st.none() | st.lists(st.lists(st.tuples(st.integers(0, 9), st.none() | finite_floats, st.integers(1, 9)))),
)
rows = st.builds(
    FinishedRow,
    source=st.integers(0, 9),
    row=st.integers(0, 2**40),
    error=st.none() | st.builds(RowError, st.text(), st.text()),
    prompt_tokens=st.none() | st.integers(0, 10**6),
    samples=st.lists(samples, max_size=3),
)


@given(rows)
def test_a_row_survives_json_bit_for_bit(row: FinishedRow) -> None:
    assert row_from_json(json.loads(json.dumps(row_to_json(row)))) == row
