from __future__ import annotations

import pytest

from batchgen.data.reasoning import opens_reasoning, split_reasoning
from batchgen.data.rows import KeptColumns, finished_row, row_from_json, row_to_json
from batchgen.records import Completion, Sample


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "answer"),
    [
        ("<think>\na\n</think>\n\nb", False, "a", "b"),
        (" \n<think>a</think>b</think>", False, "a", "b</think>"),
        ("a\n</think>\nb", True, "a", "b"),
        ("<think>a</think>b", True, "a", "b"),
        # A template that opens the tag where nothing says so: rows of token ids.
        ("a</think> b", False, "a", "b"),
        # Cut before the answer.
        ("<think>a", False, "a", ""),
        ("a", True, "a", ""),
        ("<think></think>b", False, "", "b"),
        # No reasoning: the text stays as it is.
        (" b ", False, None, " b "),
        ("", False, None, ""),
        ("HTML has no <think> and no </think>", False, None, "HTML has no <think> and no </think>"),
    ],
)
def test_what_comes_first_is_reasoning_and_what_follows_is_the_answer(
    text: str, is_open: bool, reasoning: str | None, answer: str
) -> None:
    assert split_reasoning(text, is_open) == (reasoning, answer)


def test_a_prompt_may_open_it() -> None:
    assert opens_reasoning("<|im_start|>assistant\n<think>\n")
    assert not opens_reasoning("<think></think>")


def test_a_row_keeps_its_reasoning_where_it_is_asked_for() -> None:
    completion = Completion(0, [1], [Sample([1, 2], "a</think>b", "stop"), Sample([3], None, None)])
    row = finished_row(0, 0, completion, KeptColumns(reasoning=True), is_thinking=True)
    assert [(sample.reasoning, sample.text) for sample in row.samples] == [("a", "b"), (None, None)]
    assert row_from_json(row_to_json(row)) == row
    (whole, _) = finished_row(0, 0, completion, KeptColumns(), is_thinking=True).samples
    assert (whole.reasoning, whole.text) == (None, "a</think>b")


def test_a_journal_of_an_older_release_is_read() -> None:
    stored = [0, 0, None, 1, [["a", "stop", None, True, 1, 1, 0.0, None, None, None]], None]
    assert row_from_json(stored).samples[0].reasoning is None
