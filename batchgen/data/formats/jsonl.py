"""JSON lines: one object a line (RFC 8259, UTF-8); what is wrong with a line is that row's error."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchgen.data.arrow_types import to_array
from batchgen.data.compression import detect_compression
from batchgen.data.file_identity import file_identity
from batchgen.data.input_rows import OFFSET_EVERY, BadRow, InputFile, InputRow, RowFailure, ScannedFile
from batchgen.data.json_shape import JsonShape
from batchgen.data.text_lines import LineReader, SkippedRows
from batchgen.errors import InputError

MAX_COLUMNS = 4096
"""Distinct keys of all rows together; with more, keys are data, and no table can hold them."""

_NUM_BAD_ROWS_KEPT = 5
_BLANK = b" \t\r\n"
_TABLE_ROWS = 1024
_LONE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_TYPE_NAMES = {str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "an array"}


class JsonlFormat:
    """One JSON object a line."""

    def scan(self, file: InputFile, max_row_bytes: int) -> ScannedFile:
        """Read the whole file once: rows, their shapes, an offset every OFFSET_EVERY rows, the hash of its bytes."""
        compression = detect_compression(file.path)
        lines = LineReader(file.path, compression, max_row_bytes)
        pass_ = _PlanPass(file)
        with file_identity(file.path) as identity, closing(lines):
            for line in lines:
                pass_.take(line.number, line.offset, line.content)
        pass_.check_is_no_array()
        return ScannedFile(
            source=file.source,
            path=str(file.path),
            name=file.name,
            format="jsonl",
            compression=compression,
            size=identity.size,
            mtime_ns=identity.mtime_ns,
            inode=identity.inode,
            sha256=identity.sha256,
            num_rows=pass_.num_rows,
            columns={name: shape.to_json() for name, shape in pass_.shape.fields.items()},
            skipped=tuple(pass_.skipped.ranges),
            offsets=tuple(pass_.offsets),
            num_bad_rows=pass_.num_bad_rows,
            bad_rows=tuple(pass_.bad_rows),
        )

    def columns_of(self, files: Sequence[ScannedFile]) -> pa.Schema:
        """Each column with the one type that holds its values in all files."""
        shape = JsonShape()
        for file in files:
            for name, column in file.columns.items():
                shape.fields.setdefault(name, JsonShape()).merge(JsonShape.from_json(column))
        return pa.schema([column.arrow_field(name) for name, column in shape.fields.items()])

    def open(self, file: ScannedFile, schema: pa.Schema, max_row_bytes: int) -> JsonlCursor:
        """Open for the columns of `schema`."""
        return JsonlCursor(file, schema, max_row_bytes)


class _PlanPass:
    """What the plan pass gathers line by line."""

    def __init__(self, file: InputFile) -> None:
        self.file = file
        self.shape = JsonShape()
        self.skipped = SkippedRows()
        self.offsets: list[int] = []
        self.bad_rows: list[BadRow] = []
        self.num_rows = 0
        self.num_bad_rows = 0
        self.num_good_rows = 0
        self.starts_as_array = False

    def take(self, number: int, offset: int, content: bytes | None) -> None:
        """Take one line into account."""
        self.num_rows = number + 1
        if number % OFFSET_EVERY == 0:
            self.offsets.append(offset)
        if content is not None and not content.strip(_BLANK):
            self.skipped.add(number)
            return
        if not self.num_good_rows + self.num_bad_rows:
            self.starts_as_array = content is not None and content.lstrip(_BLANK).startswith(b"[")
        try:
            values = parse_row(content)
        except RowFailure as failure:
            self.num_bad_rows += 1
            if len(self.bad_rows) < _NUM_BAD_ROWS_KEPT:
                self.bad_rows.append(BadRow(number, *failure.error))
            return
        self.num_good_rows += 1
        self._observe(values)

    def _observe(self, values: dict[str, Any]) -> None:
        fields = self.shape.fields
        for name, value in values.items():
            shape = fields.get(name)
            if shape is None:
                if len(fields) == MAX_COLUMNS:
                    raise InputError(
                        f"{self.file.path}:{self.num_rows}: the rows have more than {MAX_COLUMNS} different keys, "
                        f"the last is {name!r}; put keys that are data into one object or list"
                    )
                shape = fields[name] = JsonShape()
            shape.observe(value)

    def check_is_no_array(self) -> None:
        """Refuse a file that is one JSON array: no line of it is a row."""
        if self.starts_as_array and not self.num_good_rows:
            raise InputError(f"{self.file.path}: is a JSON array, not one object a line; convert it (jq -c '.[]')")


class JsonlCursor:
    """An open file of JSON lines."""

    def __init__(self, file: ScannedFile, schema: pa.Schema, max_row_bytes: int) -> None:
        self._file = file
        self._schema = schema
        self._names = schema.names
        self._lines = LineReader(Path(file.path), file.compression, max_row_bytes)

    def rows(self, start: int, stop: int) -> Iterator[InputRow]:
        """The rows of a half-open range, in order."""
        stop = min(stop, self._file.num_rows)
        if start >= stop:
            return
        self._lines.seek(self._file, start)
        for line in self._lines:
            if line.content is None or line.content.strip(_BLANK):
                yield self._row(line.number, line.content)
            if line.number + 1 >= stop:
                return
        raise InputError(f"{self._file.path}: has become shorter since the plan was made; put it back")

    def _row(self, number: int, content: bytes | None) -> InputRow:
        try:
            values = parse_row(content)
        except RowFailure as failure:
            return InputRow(self._file.source, number, {}, failure.error)
        return InputRow(self._file.source, number, {name: values.get(name) for name in self._names})

    def tables(self, start: int, stop: int) -> Iterator[pa.Table]:
        """The same rows as Arrow data, at most 1024 at a time; a row with an error is all null."""
        for first in range(start, min(stop, self._file.num_rows), _TABLE_ROWS):
            rows = list(self.rows(first, min(first + _TABLE_ROWS, stop)))
            arrays = [to_array([row.values.get(field.name) for row in rows], field) for field in self._schema]
            if arrays:
                yield pa.Table.from_arrays(arrays, schema=self._schema)

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


class _DuplicateKey(Exception):
    pass


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _DuplicateKey(name)
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
        values = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise RowFailure("bad_json", f"not JSON at character {error.pos + 1} of the line: {error.msg}") from error
    except _DuplicateKey as error:
        raise RowFailure("duplicate_key", f"the key {str(error)!r} stands twice in one object") from error
    except RecursionError as error:
        raise RowFailure("bad_json", "nested too deeply") from error
    except ValueError as error:  # An integer of more digits than Python converts.
        raise RowFailure("bad_json", "a number has too many digits") from error
    if not isinstance(values, dict):
        what = "null" if values is None else _TYPE_NAMES[type(values)]
        raise RowFailure("not_an_object", f"the line holds {what}, not an object")
    if _LONE_SURROGATE.search(content):
        _refuse_lone_surrogates(values)
    return values


def _refuse_lone_surrogates(values: dict[str, Any]) -> None:
    try:
        json.dumps(values, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise RowFailure("invalid_utf8", f"\\u{code:04x} is half of a surrogate pair, which is no character") from error
