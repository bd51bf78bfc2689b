"""What the formats of text have in common: a plan pass over records, and a cursor over them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import pyarrow as pa

from batchgen.data.arrow_types import to_array
from batchgen.data.compression import detect_compression
from batchgen.data.file_identity import file_identity
from batchgen.data.input_rows import (
    OFFSET_EVERY,
    TABLE_BYTES,
    TABLE_ROWS,
    BadRow,
    InputFile,
    InputRow,
    RowFailure,
    ScannedFile,
)
from batchgen.data.text_lines import LineReader
from batchgen.errors import InputError

_NUM_BAD_ROWS_KEPT = 5

Content = TypeVar("Content")


class Record(NamedTuple, Generic[Content]):
    """One physical row."""

    number: int
    offset: int
    """Where it begins, in bytes of the decompressed file."""
    content: Content


class Records(Protocol[Content]):
    """The physical rows of an open file, and what each of them holds."""

    def __iter__(self) -> Iterator[Record[Content]]:
        """From where the reader stands to the end of the file."""
        ...

    def jump(self, offset: int, number: int) -> None:
        """Go to row `number`, which begins at `offset`."""
        ...

    def parse(self, content: Content) -> dict[str, Any] | None:
        """The row's columns; None for a blank line, which is no row; RowFailure for a row that is wrong."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


OpenRecords = Callable[[LineReader], Records[Content]]


class TextPlan(NamedTuple):
    """What the plan pass found, beside the columns that the format noted itself."""

    file: ScannedFile
    num_good_rows: int


def plan_text(
    file: InputFile,
    max_row_bytes: int,
    open_records: OpenRecords[Content],
    observe: Callable[[dict[str, Any]], None],
) -> TextPlan:
    """Read the whole file once: an offset every OFFSET_EVERY rows, blank lines, bad rows, the hash of its bytes.

    `observe` is called with the columns of each good row.
    """
    compression = detect_compression(file.path)
    pass_ = _PlanPass()
    records = open_records(LineReader(file.path, compression, max_row_bytes))
    with file_identity(file.path) as identity, closing(records):
        for record in records:
            pass_.take(record, records.parse, observe)
    scanned = ScannedFile(
        source=file.source,
        path=str(file.path),
        name=file.name,
        format=file.format,
        compression=compression,
        size=identity.size,
        mtime_ns=identity.mtime_ns,
        inode=identity.inode,
        sha256=identity.sha256,
        num_rows=pass_.num_rows,
        columns={},
        skipped=tuple(pass_.skipped),
        offsets=tuple(pass_.offsets),
        num_bad_rows=pass_.num_bad_rows,
        bad_rows=tuple(pass_.bad_rows),
    )
    return TextPlan(scanned, pass_.num_good_rows)


class _PlanPass:
    """What is gathered row by row."""

    def __init__(self) -> None:
        self.skipped: list[tuple[int, int]] = []
        self.offsets: list[int] = []
        self.bad_rows: list[BadRow] = []
        self.num_rows = 0
        self.num_bad_rows = 0
        self.num_good_rows = 0

    def take(
        self,
        record: Record[Content],
        parse: Callable[[Content], dict[str, Any] | None],
        observe: Callable[[dict[str, Any]], None],
    ) -> None:
        """Take one physical row into account."""
        self.num_rows = record.number + 1
        if record.number % OFFSET_EVERY == 0:
            self.offsets.append(record.offset)
        try:
            values = parse(record.content)
        except RowFailure as failure:
            self.num_bad_rows += 1
            if len(self.bad_rows) < _NUM_BAD_ROWS_KEPT:
                self.bad_rows.append(BadRow(record.number, *failure.error))
            return
        if values is None:
            self._skip(record.number)
        else:
            self.num_good_rows += 1
            observe(values)

    def _skip(self, row: int) -> None:
        if self.skipped and self.skipped[-1][1] == row:
            self.skipped[-1] = (self.skipped[-1][0], row + 1)
        else:
            self.skipped.append((row, row + 1))


class TextCursor(Generic[Content]):
    """An open file of records."""

    def __init__(
        self, file: ScannedFile, schema: pa.Schema, max_row_bytes: int, open_records: OpenRecords[Content]
    ) -> None:
        self._file = file
        self._schema = schema
        self._lines = LineReader(Path(file.path), file.compression, max_row_bytes)
        self._records = open_records(self._lines)
        self._at: int | None = None
        """The row that would be read next; None where nothing was read yet."""

    def rows(self, start: int, stop: int, names: Collection[str]) -> Iterator[InputRow]:
        """The rows of a half-open range, in order, with these columns."""
        stop = min(stop, self._file.num_rows)
        if start >= stop:
            return
        self._seek(start)
        for record in self._records:
            self._at = record.number + 1
            if record.number >= start:
                row = self._row(record, names)
                if row is not None:
                    yield row
            if self._at >= stop:
                return
        raise InputError(f"{self._file.path}: has become shorter since the plan was made; put it back")

    def _seek(self, row: int) -> None:
        index = row // OFFSET_EVERY
        if self._at is None or not index * OFFSET_EVERY <= self._at <= row:
            self._at = index * OFFSET_EVERY
            self._records.jump(self._file.offsets[index], self._at)

    def _row(self, record: Record[Content], names: Collection[str]) -> InputRow | None:
        try:
            values = self._records.parse(record.content)
        except RowFailure as failure:
            return InputRow(self._file.source, record.number, {}, failure.error)
        if values is None:
            return None
        return InputRow(self._file.source, record.number, {name: values.get(name) for name in names})

    def tables(self, start: int, stop: int) -> Iterator[pa.Table]:
        """The same rows as Arrow data, at most TABLE_ROWS at a time; a row with an error is all null.

        A table goes over TABLE_BYTES by two rows at most.
        """
        held: list[InputRow] = []
        begun: int | None = None
        for row in self.rows(start, stop, self._schema.names):
            held.append(row)
            begun = self._lines.offset if begun is None else begun
            # A few bytes of an archive may be many long rows: bytes are those of the file, decompressed.
            if len(held) == TABLE_ROWS or self._lines.offset - begun >= TABLE_BYTES:
                yield self._table(held)
                held, begun = [], self._lines.offset
        if held:
            yield self._table(held)

    def _table(self, rows: list[InputRow]) -> pa.Table:
        arrays = [to_array([row.values.get(field.name) for row in rows], field) for field in self._schema]
        return pa.Table.from_arrays(arrays, schema=self._schema)

    def close(self) -> None:
        """Close the file."""
        self._records.close()
