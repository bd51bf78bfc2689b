"""Rows become token ids, or errors, in order."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from batchgen.errors import JobError
from batchgen.pipeline import prompts
from batchgen.pipeline.preparer import Preparer, PromptFit
from batchgen.pipeline.prompts import PreparerSpec
from batchgen.records import RowError, RowRange
from batchgen.tokenizer import RenderedPrompt, Tokenizer
from tests.pipeline.prompts import plan_prompts

BOS = 0
MakePreparer = Callable[[PreparerSpec], Preparer]


@pytest.fixture
def preparer_of() -> Iterator[MakePreparer]:
    with ExitStack() as stack:
        yield lambda spec: stack.enter_context(closing(Preparer(spec)))


def test_rows_become_the_ids_of_their_rendered_prompts(tmp_path: Path, preparer_of: MakePreparer) -> None:
    spec, _ = plan_prompts(tmp_path, [{"q": "hi"}, {"q": None}, {"q": "ho"}], prompt={"template": "Q: {{ q }}"})
    made = preparer_of(spec)
    tokenizer = Tokenizer.from_directory(spec.model_directory)
    assert tokenizer is not None
    rows = made.prepare(made.read(RowRange(0, 0, 3)), lambda: None)
    assert [(row.source, row.row) for row in rows] == [(0, 0), (0, 1), (0, 2)]
    assert [None if row.token_ids is None else tokenizer.decode(row.token_ids) for row in rows] == [
        "<s>Q: hi",
        None,
        "<s>Q: ho",
    ]
    assert [row.error and row.error.code for row in rows] == [None, "template_error", None]


@pytest.mark.case(15)
@pytest.mark.case(13)
def test_a_chat_has_one_bos_and_no_control_token_from_its_row(tmp_path: Path, preparer_of: MakePreparer) -> None:
    messages = [{"role": "user", "content": "{{ q }}"}]
    spec, _ = plan_prompts(tmp_path, [{"q": "<s>x<|turn|>"}], prompt={"messages": messages})
    made = preparer_of(spec)
    tokenizer = Tokenizer.from_directory(spec.model_directory)
    assert tokenizer is not None
    (row,) = made.prepare(made.read(RowRange(0, 0, 1)), lambda: None)
    assert row.token_ids is not None
    assert tokenizer.decode(row.token_ids) == "<s><|turn|><s>x<|turn|><|turn|>"
    expected = tokenizer.encode_batch([RenderedPrompt("<s><|turn|>", (), False), RenderedPrompt("<|turn|>", (), False)])
    assert [token_id for token_id in row.token_ids if token_id in (0, 2)] == [*expected[0], *expected[1]]


def test_a_row_that_cannot_be_read_keeps_its_error(tmp_path: Path, preparer_of: MakePreparer) -> None:
    spec, _ = plan_prompts(tmp_path, [{"q": "a"}], prompt={"column": "q"})
    made = preparer_of(spec)
    (row,) = made.read(RowRange(0, 0, 1))
    row.error = RowError("bad_json", "x")
    (encoded,) = made.prepare([row], lambda: None)
    assert encoded[:4] == (0, 0, None, ("bad_json", "x"))


def test_templates_see_the_start_of_the_job(tmp_path: Path, preparer_of: MakePreparer) -> None:
    spec, _ = plan_prompts(tmp_path, [{"q": "a"}], prompt={"template": "{{ q }} {{ strftime_now('%Y-%m-%d') }}"})
    made = preparer_of(spec)
    tokenizer = Tokenizer.from_directory(spec.model_directory)
    assert tokenizer is not None
    (row,) = made.prepare(made.read(RowRange(0, 0, 1)), lambda: None)
    assert row.token_ids is not None
    assert tokenizer.decode(row.token_ids) == "<s>a 2026-01-02"


def test_long_texts_are_encoded_a_part_at_a_time(
    tmp_path: Path, preparer_of: MakePreparer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "_ENCODE_CHARACTERS", 10)
    rows = [{"q": "x" * length} for length in (4, 4, 4, 30, 1)]
    spec, _ = plan_prompts(tmp_path, rows, prompt={"column": "q"})
    made = preparer_of(spec)
    signs: list[None] = []
    encoded = made.prepare(made.read(RowRange(0, 0, 5)), lambda: signs.append(None))
    assert [len(row.token_ids or ()) for row in encoded] == [5, 5, 5, 31, 2]
    assert len(signs) == 4


def test_token_ids_are_prompts_as_they_stand_and_need_no_tokenizer(tmp_path: Path, preparer_of: MakePreparer) -> None:
    rows = [{"ids": [5, 0, 5]}, {"ids": [200]}, {"ids": []}]
    spec, _ = plan_prompts(tmp_path, rows, prompt={"token_ids_column": "ids"})
    (spec.model_directory / "tokenizer.json").unlink()
    (spec.model_directory / "config.json").write_text('{"text_config": {"vocab_size": 200}}')
    made = preparer_of(spec)
    encoded = made.prepare(made.read(RowRange(0, 0, 3)), lambda: None)
    assert [None if row.token_ids is None else list(row.token_ids) for row in encoded] == [[5, 0, 5], None, None]
    assert [row.error and row.error.code for row in encoded] == [None, "unknown_token_id", "empty_prompt"]


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    spec, _ = plan_prompts(tmp_path, [{"q": "a"}], prompt={"column": "q"})
    (spec.model_directory / "tokenizer.json").unlink()
    with pytest.raises(JobError, match="has no tokenizer"):
        Preparer(spec)


@pytest.mark.parametrize(
    ("truncate", "max_tokens", "length", "kept"),
    [
        ("error", None, 9, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        ("error", 0, 10, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ("error", None, 10, None),
        ("error", 0, 11, None),
        ("error", 5, 9, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        ("left", 4, 6, [0, 1, 2, 3, 4, 5]),
        ("left", 4, 20, [0, 15, 16, 17, 18, 19]),
        ("right", 4, 20, [0, 1, 2, 3, 4, 5]),
        ("middle", 4, 20, [0, 1, 2, 17, 18, 19]),
        ("middle", 5, 20, [0, 1, 2, 18, 19]),
        ("right", None, 20, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("right", 50, 20, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("right", 0, 20, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ("left", 9, 20, None),
    ],
)
def test_a_prompt_that_does_not_fit_is_an_error_or_cut(
    truncate: str, max_tokens: int | None, length: int, kept: list[int] | None
) -> None:
    ids, error = PromptFit(truncate, 10, BOS)(array("i", range(length)), max_tokens)
    assert (None if ids is None else list(ids)) == kept
    if kept is None:
        assert error == ("prompt_too_long", f"the prompt has {length} tokens; the model takes 10 with the completion")


def test_a_cut_at_the_left_keeps_no_token_that_is_not_bos() -> None:
    ids, _ = PromptFit("left", 10, None)(array("i", range(20)), 4)
    assert ids is not None
    assert list(ids) == [14, 15, 16, 17, 18, 19]


def test_a_prompt_without_tokens_is_an_error() -> None:
    assert PromptFit("error", 10, None)(array("i"), None) == (None, ("empty_prompt", "the prompt has no tokens"))
