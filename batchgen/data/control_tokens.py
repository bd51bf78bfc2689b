"""Which parts of a rendered prompt came from row data and would be read as control tokens.

A template may split, trim or join values, so positions in values say nothing about positions in the text. Instead the
prompt is rendered a second time from marked values: every character of them that control tokens are built with (`<`,
`|`, `[` …) is replaced by another one that stands for it, and found again in the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from batchgen.data.input_rows import RowFailure
from batchgen.data.sandbox import Renderer

_MARK_BASES = range(0x2A000, 0x20000, -0x400)
"""Blocks of rare ideographs, which case, trimming and Python's repr leave alone; one that the row does not use is
taken."""


class ControlTokens:
    """The spellings of a tokenizer's control tokens."""

    def __init__(self, spellings: tuple[str, ...]) -> None:
        longest_first = sorted(filter(None, spellings), key=lambda spelling: (-len(spelling), spelling))
        choices = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self._token = re.compile(choices)
        self._token_at = re.compile(f"(?=({choices}))")
        self._builders = "".join(sorted({char for spelling in longest_first for char in _builders(spelling)}))
        self._builder = re.compile(f"[{re.escape(self._builders)}]" if self._builders else r"(?!)")

    def render(self, render: Renderer, values: dict[str, Any]) -> tuple[str, tuple[tuple[int, int], ...]]:
        """The prompt, and spans [start, stop) of it that must be encoded as plain text.

        No control token of the prompt outside the spans has one of its building characters from `values`.
        """
        text = render(values)
        if not self._token.search(text) or not any(map(self._builder.search, _strings(values))):
            return text, ()
        base = self._free_base([text, *_strings(values)])
        marks = {ord(char): base + index for index, char in enumerate(self._builders)}
        marked = render({name: _marked(value, self._builder, marks) for name, value in values.items()})
        if self._token.findall(marked) == self._token.findall(text):
            return text, ()
        # Where the template looks at the very characters that are marked, this is the text it gives without them.
        restored = marked.translate({mark: char for char, mark in marks.items()})
        return restored, tuple(self._spans(restored, marked, base))

    def _free_base(self, texts: list[str]) -> int:
        used = {ord(char) for text in texts for char in set(text) if ord(char) >= _MARK_BASES[-1]}
        size = len(self._builders)
        for base in _MARK_BASES:
            if not any(base <= char < base + size for char in used):
                return base
        raise RowFailure("template_error", "the row has control tokens beside rare ideographs of too many kinds")

    def _spans(self, restored: str, marked: str, base: int) -> Iterator[tuple[int, int]]:
        inside: set[int] = set()
        for match in self._token_at.finditer(restored):
            inside.update(range(*match.span(1)))
        run = re.compile(f"[{chr(base)}-{chr(base + len(self._builders) - 1)}]+")
        for match in run.finditer(marked):
            if not inside.isdisjoint(range(*match.span())):
                yield match.span()


def _builders(spelling: str) -> str:
    """The characters without which nobody spells the token; letters alone may stand anywhere in a text."""
    return "".join(char for char in spelling if not (char.isalnum() or char.isspace() or char == "_")) or spelling


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _strings(name)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _marked(value: Any, builder: re.Pattern[str], marks: dict[int, int]) -> Any:
    if isinstance(value, str):
        return value.translate(marks) if builder.search(value) else value
    if isinstance(value, dict):
        return {_marked(name, builder, marks): _marked(item, builder, marks) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_marked(item, builder, marks) for item in value]
    return value
