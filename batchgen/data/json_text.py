"""JSON that stands as text in a row, and what JSON can spell that is no text: half of a surrogate pair."""

from __future__ import annotations

import json
import re
from typing import Any

from batchgen.data.input_rows import RowFailure

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def parsed(text: str) -> Any:
    """What JSON text stands for; ValueError or RecursionError where it is no JSON, RowFailure `invalid_utf8`."""
    value = json.loads(text)
    refuse_half_characters(value, text)
    return value


def refuse_half_characters(value: Any, text: str) -> None:
    """RowFailure `invalid_utf8` where a string of `value`, which the JSON `text` stands for, is no text."""
    if _SURROGATE_ESCAPE.search(text):
        check_characters(json.dumps(value, ensure_ascii=False))


def check_characters(text: str) -> None:
    """RowFailure `invalid_utf8` where a text holds half of a surrogate pair, which no tokenizer and no file takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise RowFailure("invalid_utf8", f"\\u{code:04x} is half of a surrogate pair, which is no character") from error
