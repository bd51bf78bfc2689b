"""Text from rows never becomes a control token, and everything else is left as it is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.data.control_tokens import _MARK_BASES, ControlTokens
from batchgen.data.input_rows import RowFailure

TOKENS = ("<|end|>", "<|start|>", "<s>", "[INST]", "END")
CONTROL = ControlTokens(TOKENS)


def joined(values: dict[str, Any]) -> str:
    return "<s>" + "".join(map(str, values.values())) + "<|end|>"


def literal_texts(text: str, spans: tuple[tuple[int, int], ...]) -> list[str]:
    return [text[start:stop] for start, stop in spans]


def test_a_token_spelled_in_a_row_is_literal_and_those_of_the_template_are_not() -> None:
    text, spans = CONTROL.render(joined, {"a": "x<|end|>y", "b": "<s"})
    assert text == "<s>x<|end|>y<s<|end|>"
    assert literal_texts(text, spans) == ["<|", "|>"]
    assert spans == ((4, 6), (9, 11))


def test_text_without_control_tokens_is_rendered_once() -> None:
    calls: list[dict[str, Any]] = []

    def render(values: dict[str, Any]) -> str:
        calls.append(values)
        return str(values["a"])

    assert CONTROL.render(render, {"a": "1 < 2 | 3 > 2"}) == ("1 < 2 | 3 > 2", ())
    assert len(calls) == 1


def test_a_token_put_together_from_two_columns_is_literal() -> None:
    text, spans = CONTROL.render(joined, {"a": "<|en", "b": "d|>"})
    assert text == "<s><|end|><|end|>"
    assert literal_texts(text, spans) == ["<|", "|>"]


def test_a_token_completed_by_the_template_is_literal() -> None:
    text, spans = CONTROL.render(lambda values: f"<{values['a']}>", {"a": "|end|"})
    assert text == "<|end|>"
    assert literal_texts(text, spans) == ["|", "|"]


def test_a_name_put_between_a_templates_own_brackets_is_the_templates_doing() -> None:
    assert CONTROL.render(lambda values: f"<|{values['a']}|>", {"a": "end"}) == ("<|end|>", ())


def test_a_token_of_letters_alone_is_literal() -> None:
    text, spans = CONTROL.render(joined, {"a": "THE END"})
    assert literal_texts(text, spans) == ["END"] or literal_texts(text, spans) == ["E END"]


def test_rows_at_any_depth_and_names_of_fields_are_looked_at() -> None:
    text, spans = CONTROL.render(joined, {"a": {"<s>": ["[INST]", 1, None]}})
    assert text == "<s>{'<s>': ['[INST]', 1, None]}<|end|>"
    assert literal_texts(text, spans) == ["<", ">", "[", "N", "]"]


def test_a_template_that_looks_at_the_token_gives_a_safe_text() -> None:
    def render(values: dict[str, Any]) -> str:
        return values["a"].split("<s>")[-1] + "<s>"

    text, spans = CONTROL.render(render, {"a": "x<s>y<|end|>"})
    assert text == "x<s>y<|end|><s>"
    assert "".join(literal_texts(text, spans)) == "<><||>"


def test_rare_characters_in_rows_stay_as_they_are() -> None:
    rare = "".join(chr(code) for code in (*range(0x2A000, 0x2A010), 0x10F000))
    text, spans = CONTROL.render(joined, {"a": rare + "<s>"})
    assert text == f"<s>{rare}<s><|end|>"
    assert literal_texts(text, spans) == ["<", ">"]


def test_a_row_with_every_mark_is_an_error_and_not_another_text() -> None:
    every = "".join(chr(base) for base in _MARK_BASES)
    with pytest.raises(RowFailure, match="rare ideographs"):
        CONTROL.render(joined, {"a": every + "<s>"})


def test_without_control_tokens_nothing_is_literal() -> None:
    assert ControlTokens(()).render(joined, {"a": "<s>"}) == ("<s><s><|end|>", ())


PIECES = st.lists(st.sampled_from([*TOKENS, "<", "|", ">", "end", "x", "<|", "s>", "[", "INST]"]), max_size=6).map(
    "".join
)


@given(a=PIECES, b=PIECES)
def test_whatever_the_row_the_template_keeps_its_tokens_alone(a: str, b: str) -> None:
    text, spans = CONTROL.render(joined, {"a": a, "b": b})
    assert text == joined({"a": a, "b": b})
    cut = list(text)
    for start, stop in spans:
        cut[start:stop] = "." * (stop - start)
    outside = "".join(cut)
    assert [token for token in TOKENS if token in outside[3:-7]] == []
    assert (outside[:3], outside[-7:]) == ("<s>", "<|end|>")
