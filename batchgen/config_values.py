"""Values of the job file that are more than a YAML scalar: byte sizes, durations, `auto`, templates, paths."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal

from jinja2 import Environment, TemplateSyntaxError
from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from batchgen.bounds import MAX_COUNT, MAX_PROCESSES
from batchgen.units import parse_bytes, parse_duration

_BYTES_PATTERN = r"^\d+(\.\d+)?\s*([kKmMgGtT][iI]?)?[bB]?$"
_DURATION_PATTERN = r"^(\d+(\.\d+)?(ms|s|m|h|d)\s*)+$"

ARROW_TYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "string", "large_string", "binary", "large_binary", "date32", "date64"),
    *("time32[s]", "time32[ms]", "time64[us]", "time64[ns]"),
    *("timestamp[s]", "timestamp[ms]", "timestamp[us]", "timestamp[ns]"),
)
"""What `input.schema` may name: pyarrow's aliases of the plain types."""


def describe(value: object) -> str:
    """A value as the end of a sentence: `the text "4"`, `-1`, `a list`."""
    if value is None:
        return "nothing"
    if isinstance(value, str):
        shown = value if len(value) <= 40 else value[:39] + "…"
        return f"the text {json.dumps(shown, ensure_ascii=False)}"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list" if value else "an empty list"
    return json.dumps(value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


MAX_BYTES = 2**63 - 1
MAX_SECONDS = 1e9
"""30 years; the system's clocks and waits take no more than about 290."""


def _is_whole(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def _check_count(value: object, most: int = MAX_COUNT) -> object:
    if value == "auto" or _is_whole(value, most):
        return value
    bound = f" and <= {most}" if isinstance(value, int) and value > most else ""
    raise ValueError(f'must be "auto" or a whole number >= 1{bound}, got {describe(value)}')


def _check_processes(value: object) -> object:
    return _check_count(value, MAX_PROCESSES)


def _check_bytes(value: object) -> object:
    return value if value == "auto" else _check_size(value, '"auto" or ')


def _check_size(value: object, auto: str = "") -> object:
    size = parse_bytes(value) if isinstance(value, str) and value != "auto" else value
    if _is_whole(size, MAX_BYTES):
        return size
    raise ValueError(f"must be {auto}a number of bytes such as 256MiB, got {describe(value)}")


def _check_duration(value: object) -> object:
    seconds = parse_duration(value) if isinstance(value, str) else value
    if _is_number(seconds) and isinstance(seconds, (int, float)) and 0 <= seconds <= MAX_SECONDS:
        return float(seconds)
    if isinstance(seconds, (int, float)) and MAX_SECONDS < seconds < math.inf:
        raise ValueError(f"must be at most {MAX_SECONDS:.0f} seconds, got {describe(value)}")
    raise ValueError(f"must be seconds or a time such as 90s, 30m or 1h30m, got {describe(value)}")


def _check_optional_duration(value: object) -> object:
    return None if value is None else _check_duration(value)


def _check_paths(value: object) -> object:
    items = value if isinstance(value, (list, tuple)) else [value]
    if not items or not all(isinstance(item, str) and item for item in items):
        raise ValueError(f"must be a path or pattern, or a list of them, got {describe(value)}")
    return list(items) if isinstance(value, tuple) else value


def check_template(text: str) -> str:
    """Raise ValueError where Jinja cannot parse the template; returns it as it is."""
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
    except TemplateSyntaxError as error:
        raise ValueError(f"not a valid Jinja template, line {error.lineno} of it: {error.message}") from error
    return text


def check_expression(text: str) -> str:
    """Raise ValueError where Jinja cannot parse the expression; returns it as it is."""
    try:
        Environment().parse("{{ " + text + " }}")
    except TemplateSyntaxError as error:
        raise ValueError(f"not a valid Jinja expression: {error.message}") from error
    return text


_DURATION_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "number", "minimum": 0},
        {"type": "string", "pattern": _DURATION_PATTERN, "examples": ["90s", "1h30m"]},
    ]
}
_BYTES_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"const": "auto", "type": "string"},
        {"type": "integer", "minimum": 1},
        {"type": "string", "pattern": _BYTES_PATTERN, "examples": ["256MiB", "2GB"]},
    ]
}

AutoCount = Annotated[Literal["auto"] | Annotated[int, Field(ge=1, le=MAX_COUNT)], BeforeValidator(_check_count)]
"""`auto` or a whole number from 1."""

AutoProcesses = Annotated[
    Literal["auto"] | Annotated[int, Field(ge=1, le=MAX_PROCESSES)], BeforeValidator(_check_processes)
]
"""`auto` or how many workers or threads."""

AutoBytes = Annotated[Literal["auto"] | int, BeforeValidator(_check_bytes), WithJsonSchema(_BYTES_SCHEMA)]
"""`auto` or a number of bytes, written with a unit or without."""

Bytes = Annotated[int, BeforeValidator(_check_size), WithJsonSchema({"anyOf": _BYTES_SCHEMA["anyOf"][1:]})]
"""A number of bytes, written with a unit or without."""

Duration = Annotated[float, BeforeValidator(_check_duration), WithJsonSchema(_DURATION_SCHEMA)]
"""Seconds, written as a number or with units."""

OptionalDuration = Annotated[
    float | None,
    BeforeValidator(_check_optional_duration),
    WithJsonSchema({"anyOf": [*_DURATION_SCHEMA["anyOf"], {"type": "null"}]}),
]

Paths = Annotated[str | list[str], BeforeValidator(_check_paths)]
"""One path or pattern, or several."""

Template = Annotated[str, AfterValidator(check_template)]
"""Jinja source that parses."""

Expression = Annotated[str, Field(min_length=1), AfterValidator(check_expression)]
"""A Jinja expression that parses."""
