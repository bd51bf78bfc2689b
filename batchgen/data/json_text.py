"""JSON as rows may hold it: RFC 8259 to the letter, each key once, every string a text."""

from __future__ import annotations

import json
import re
from typing import Any

from batchgen.data.input_rows import RowFailure

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def parsed(text: str) -> Any:
    """What JSON stands for; ValueError or RecursionError where it is none.

    RowFailure `duplicate_key`, `bad_json` for what Python reads and JSON does not have, such as NaN, and `invalid_utf8`
    for half of a surrogate pair, which JSON can spell.
    """
    value = _DECODER.decode(text)
    if _SURROGATE_ESCAPE.search(text):
        check_characters(json.dumps(value, ensure_ascii=False))
    return value


def check_characters(text: str) -> None:
    """RowFailure `invalid_utf8` where a text holds half of a surrogate pair, which no tokenizer and no file takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise RowFailure("invalid_utf8", f"\\u{code:04x} is half of a surrogate pair, which is no character") from error


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise RowFailure("duplicate_key", f"the key {name!r} stands twice in one object")
            seen.add(name)
    return values


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise RowFailure("bad_json", f"the number {text[:40]} is beyond the range of float64")
    return number


def _no_constant(name: str) -> Any:
    raise RowFailure("bad_json", f"{name} is not JSON; write null")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_object, parse_float=_finite, parse_constant=_no_constant)
