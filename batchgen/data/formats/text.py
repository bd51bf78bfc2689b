"""Plain text: one prompt a line, in the column `text`; blank lines are no rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from batchgen.data.input_rows import InputFile, RowFailure, ScannedFile
from batchgen.data.text_lines import LineReader
from batchgen.data.text_rows import Record, TextCursor, plan_text

COLUMN = "text"


class TextFormat:
    """One row a line."""

    def scan(self, file: InputFile, max_row_bytes: int) -> ScannedFile:
        """The plan pass over one file."""
        plan = plan_text(file, max_row_bytes, TextLines, lambda values: None)
        return dataclasses.replace(plan.file, columns={COLUMN: "string"})

    def columns_of(self, files: Sequence[ScannedFile]) -> pa.Schema:
        """The one column."""
        return pa.schema([(COLUMN, pa.string())] if files else [])

    def open(self, file: ScannedFile, schema: pa.Schema, max_row_bytes: int) -> TextCursor[bytes | None]:
        """Open for the columns of `schema`."""
        return TextCursor(file, schema, max_row_bytes, TextLines)


class TextLines:
    """The lines of an open file."""

    def __init__(self, lines: LineReader) -> None:
        self._lines = lines
        self.jump = lines.jump
        self.close = lines.close

    def __iter__(self) -> Iterator[Record[bytes | None]]:
        return (Record(*line) for line in self._lines)

    def parse(self, content: bytes | None) -> dict[str, Any] | None:
        """The text of a line as it is; None where the line is blank."""
        text = decode_line(content)
        return {COLUMN: text} if text.strip() else None


def decode_line(content: bytes | None) -> str:
    """The text of a line; RowFailure where it is not UTF-8, or is longer than the limit (None)."""
    if content is None:
        raise RowFailure("row_too_long", "the line is longer than the limit for one row")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        what = f"byte 0x{content[error.start]:02X} at position {error.start} of the line is not UTF-8"
        raise RowFailure("invalid_utf8", what) from error
