"""CSV and TSV (RFC 4180): a header, then records; every cell is text, exactly as it stands.

Nothing is guessed: `NA`, `null` and `007` are text, an empty cell is an empty text. `input.schema` gives types.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from batchgen.data.input_rows import InputFile, RowFailure, ScannedFile, refuse_names_twice
from batchgen.data.text_lines import Line, LineReader
from batchgen.data.text_rows import Record, TextCursor, plan_text
from batchgen.errors import InputError

Cells = list[str] | RowFailure


class CsvFormat:
    """Records of cells between one kind of delimiter."""

    def __init__(self, delimiter: str) -> None:
        self._records = partial(CsvRecords, delimiter=delimiter)

    def scan(self, file: InputFile, max_row_bytes: int) -> ScannedFile:
        """The plan pass over one file."""
        opened: list[CsvRecords] = []

        def open_records(lines: LineReader) -> CsvRecords:
            opened.append(self._records(lines))
            return opened[0]

        plan = plan_text(file, max_row_bytes, open_records, lambda values: None)
        return dataclasses.replace(plan.file, columns={"names": opened[0].names})

    def columns_of(self, files: Sequence[ScannedFile]) -> pa.Schema:
        """The columns of all headers; each is text."""
        names = dict.fromkeys(name for file in files for name in file.columns["names"])
        return pa.schema([(name, pa.string()) for name in names])

    def open(self, file: ScannedFile, schema: pa.Schema, max_row_bytes: int) -> TextCursor[Cells]:
        """Open for the columns of `schema`."""
        return TextCursor(file, schema, max_row_bytes, partial(self._records, names=file.columns["names"]))


class CsvRecords:
    """The records of an open file; a quoted cell may hold line breaks, so a record may be several lines."""

    def __init__(self, lines: LineReader, delimiter: str, names: list[str] | None = None) -> None:
        """`names` are the header's, where it was read before."""
        self._lines = lines
        self._delimiter = delimiter
        self._number = 0
        self._size = 0
        self._first_line = 0
        self._is_open = False
        self._names = names

    @property
    def names(self) -> list[str]:
        """The header's names, once records have been read."""
        return self._names or []

    def __iter__(self) -> Iterator[Record[Cells]]:
        # The module's limit holds for one cell and for the process; the reader below bounds whole records.
        csv.field_size_limit(self._lines.max_row_bytes)
        reader = csv.reader(self._texts(), delimiter=self._delimiter, strict=True)
        if self._names is None:
            header = self._next(reader)
            if header is None:
                return
            self._names = self._checked_header(header)
        while True:
            offset = self._lines.offset
            cells = self._next(reader)
            if cells is None:
                return
            self._number += 1
            yield Record(self._number - 1, offset, cells)

    def jump(self, offset: int, number: int) -> None:
        """Go to a record whose offset is known."""
        self._lines.jump(offset, number)
        self._number = number

    def close(self) -> None:
        """Close the file."""
        self._lines.close()

    def parse(self, content: Cells) -> dict[str, Any] | None:
        """The cells by the header's names; None for a blank line."""
        if isinstance(content, RowFailure):
            raise content
        if not content:
            return None
        if len(content) != len(self.names):
            raise RowFailure("wrong_field_count", f"the row has {len(content)} fields, the header {len(self.names)}")
        try:
            "".join(content).encode("utf-8")
        except UnicodeEncodeError as error:
            byte = ord(error.object[error.start]) - 0xDC00
            raise RowFailure("invalid_utf8", f"byte 0x{byte:02X} of the row is not UTF-8") from error
        return dict(zip(self.names, content, strict=True))

    def _next(self, reader: Iterator[list[str]]) -> Cells | None:
        self._size, self._is_open = 0, False
        try:
            return next(reader, None)
        except csv.Error as error:
            if "unexpected end of data" in str(error):
                raise self._never_closed("before the end of the file") from error
            return RowFailure("bad_csv", _described(error))
        except _LineTooLong:
            return RowFailure("row_too_long", "the line is longer than the limit for one row")

    def _texts(self) -> Iterator[str]:
        """Lines for the parser, which takes as many as a record needs."""
        return map(self._text, self._lines)

    def _text(self, line: Line) -> str:
        if not self._is_open:
            self._first_line, self._is_open = line.number + 1, True
        if line.content is None:
            raise _LineTooLong
        self._size += len(line.content) + 1
        if self._size > self._lines.max_row_bytes:
            raise self._never_closed(f"within {self._lines.max_row_bytes} bytes")
        # Bytes that are not UTF-8 pass the parser as lone surrogates, and are that row's error.
        return line.content.decode("utf-8", "surrogateescape") + "\n"

    def _never_closed(self, where: str) -> InputError:
        return InputError(
            f"{self._lines.path}: a quoted cell of the record in line {self._first_line} does not end {where}; "
            'double every " inside a quoted cell'
        )

    def _checked_header(self, header: Cells) -> list[str]:
        path = self._lines.path
        if isinstance(header, RowFailure):
            raise InputError(f"{path}: the header cannot be read: {header.error.message}")
        if not header:
            raise InputError(f"{path}: the first line is blank; it must name the columns")
        try:
            "".join(header).encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(f"{path}: the header is not UTF-8; convert the file") from error
        refuse_names_twice(path, header)
        return header


class _LineTooLong(Exception):
    pass


def _described(error: csv.Error) -> str:
    if "new-line character" in str(error):
        return "a carriage return stands outside of quotes"
    return f"not CSV: {error}"
