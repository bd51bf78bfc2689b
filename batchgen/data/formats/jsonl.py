"""JSON lines: one object a line (RFC 8259, UTF-8); what is wrong with a line is that row's error."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from batchgen.data.compression import detect_compression, open_text
from batchgen.data.input_rows import InputFile, RowFailure, ScannedFile
from batchgen.data.json_shape import JsonShape
from batchgen.data.json_text import parsed
from batchgen.data.text_lines import LineReader
from batchgen.data.text_rows import Record, TextCursor, plan_text
from batchgen.errors import InputError

MAX_COLUMNS = 4096
"""Distinct keys of all rows together; with more, keys are data, and no table can hold them."""

_HEAD_BYTES = 2**16
_BLANK = b" \t\r\n"
_TYPE_NAMES = {str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "an array"}


class JsonlFormat:
    """One JSON object a line."""

    def scan(self, file: InputFile, max_row_bytes: int) -> ScannedFile:
        """The plan pass over one file."""
        columns = _Columns(file)
        plan = plan_text(file, max_row_bytes, JsonLines, columns.observe)
        if plan.file.num_bad_rows and not plan.num_good_rows:
            _refuse_other_forms(file)
        # Pairs and no mapping: the order of columns must outlive JSON whose keys are sorted.
        shapes = [[name, shape.to_json()] for name, shape in columns.shapes.items()]
        return dataclasses.replace(plan.file, columns={"shapes": shapes})

    def columns_of(self, files: Sequence[ScannedFile]) -> pa.Schema:
        """Each column with the one type that holds its values in all files."""
        shape = JsonShape()
        for file in files:
            for name, column in file.columns["shapes"]:
                shape.fields.setdefault(name, JsonShape()).merge(JsonShape.from_json(column))
        return pa.schema([column.arrow_field(name) for name, column in shape.fields.items()])

    def open(self, file: ScannedFile, schema: pa.Schema, max_row_bytes: int) -> TextCursor[bytes | None]:
        """Open for the columns of `schema`."""
        return TextCursor(file, schema, max_row_bytes, JsonLines)


class JsonLines:
    """The lines of an open file."""

    def __init__(self, lines: LineReader) -> None:
        self._lines = lines
        self.jump = lines.jump
        self.close = lines.close

    def __iter__(self) -> Iterator[Record[bytes | None]]:
        return (Record(*line) for line in self._lines)

    def parse(self, content: bytes | None) -> dict[str, Any] | None:
        """The object of a line; None where the line is blank."""
        return parse_row(content) if content is None or content.strip(_BLANK) else None


class _Columns:
    """The shapes of the columns of one file."""

    def __init__(self, file: InputFile) -> None:
        self._file = file
        self.shapes: dict[str, JsonShape] = {}

    def observe(self, values: dict[str, Any]) -> None:
        """Take one row into account."""
        for name, value in values.items():
            shape = self.shapes.get(name)
            if shape is None:
                if len(self.shapes) == MAX_COLUMNS:
                    raise InputError(
                        f"{self._file.path}: the rows have more than {MAX_COLUMNS} different keys, the last is "
                        f"{name!r}; put keys that are data into one object or list"
                    )
                shape = self.shapes[name] = JsonShape()
            shape.observe(value)


def _refuse_other_forms(file: InputFile) -> None:
    """Where no line of a file is a row, it may be something else than lines."""
    with open_text(file.path, detect_compression(file.path)) as start:
        head = start.read(_HEAD_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip(_BLANK)
    if head.startswith(b"["):
        raise InputError(f"{file.path}: is a JSON array, not one object a line; convert it (jq -c '.[]')")
    if head.startswith(b"PAR1"):
        raise InputError(f"{file.path}: is a Parquet file; name it .parquet, or set input.format")
    if head.startswith(b"{") and _spans_lines(head.decode("utf-8", "replace")):
        raise InputError(f"{file.path}: is JSON with an object over several lines; convert it (jq -c .)")


def _spans_lines(text: str) -> bool:
    """Whether a text begins with one whole JSON value that ends on another line."""
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return False
    return "\n" in text[:end]


def parse_row(content: bytes | None) -> dict[str, Any]:
    """The object that a line holds; RowFailure where it holds none. None stands for a line that is too long."""
    if content is None:
        raise RowFailure("row_too_long", "the line is longer than the limit for one row")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        what = f"byte 0x{content[error.start]:02X} at position {error.start} of the line is not UTF-8"
        raise RowFailure("invalid_utf8", what) from error
    try:
        values = parsed(text)
    except json.JSONDecodeError as error:
        raise RowFailure("bad_json", f"not JSON at character {error.pos + 1} of the line: {error.msg}") from error
    except RecursionError as error:
        raise RowFailure("bad_json", "nested too deeply") from error
    except ValueError as error:  # An integer of more digits than Python converts.
        raise RowFailure("bad_json", "a number has too many digits") from error
    if not isinstance(values, dict):
        what = "null" if values is None else _TYPE_NAMES[type(values)]
        raise RowFailure("not_an_object", f"the line holds {what}, not an object")
    return values
