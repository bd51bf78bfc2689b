"""Rows out of Arrow record batches: what the columnar formats have in common."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa

from batchgen.data.arrow_types import cast_or_convert
from batchgen.data.input_rows import TABLE_BYTES, TABLE_ROWS, InputRow, ScannedFile, UnfoldsTooFar
from batchgen.data.python_values import invalid_text_rows, to_python, value_bytes, without_rows
from batchgen.errors import InputError
from batchgen.records import RowError

Made = TypeVar("Made")


class BatchesFrom(NamedTuple):
    """The batches of a file from a row at or before the one asked for."""

    first_row: int
    batches: Iterator[pa.RecordBatch]


class BatchCursor:
    """An open file of record batches; cheap to read forward."""

    def __init__(
        self,
        file: ScannedFile,
        schema: pa.Schema,
        names: Collection[str],
        seek: Callable[[int], BatchesFrom],
        is_near: Callable[[int, int], bool],
        close: Callable[[], None],
        max_row_bytes: int,
    ) -> None:
        """`names` are the columns of `schema` that the file has, and `seek` gives at least them.

        `is_near(at, row)` tells whether reading on from `at` is better than a seek to `row`.
        """
        self._file = file
        self._schema = schema
        self._names = names
        self._seek = seek
        self._is_near = is_near
        self._close = close
        self._max_row_bytes = max_row_bytes
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._rest: pa.RecordBatch | None = None
        self._at: int | None = None

    def rows(self, start: int, stop: int, names: Collection[str]) -> Iterator[InputRow]:
        """The rows of a half-open range in order, with these columns; text of all columns is looked at."""
        for first, batch in self._slices(start, stop):
            at = first
            for rows in _in_memory(batch, lambda piece: self._python_rows(piece, names)):
                for values, error in rows:
                    yield InputRow(self._file.source, at, values, error)
                    at += 1

    def _python_rows(
        self, batch: pa.RecordBatch, names: Collection[str]
    ) -> list[tuple[dict[str, Any], RowError | None]]:
        errors = self._row_errors(batch)
        own = [name for name in names if name in self._names]
        # Of what is carried through nothing is dropped for its size: that row may well have an answer.
        for index in self._rows_too_long(batch.select(own)):
            errors.setdefault(index, RowError("row_too_long", "the row is larger than the limit for one row"))
        columns = {name: to_python(batch.column(name), errors) for name in own}
        missing = dict.fromkeys(name for name in names if name not in self._names)
        return [
            ({}, errors[index])
            if index in errors
            else ({name: column[index] for name, column in columns.items()} | missing, None)
            for index in range(batch.num_rows)
        ]

    def tables(self, start: int, stop: int) -> Iterator[pa.Table]:
        """The same rows as Arrow data with their exact types, a batch at a time; a row with an error is all null."""
        for first, batch in self._slices(start, stop):
            try:
                yield from _in_memory(batch, self._table)
            except UnfoldsTooFar:
                raise
            except MemoryError as error:
                raise UnfoldsTooFar(self._file.path, f"rows {first} to {first + batch.num_rows - 1}") from error

    def close(self) -> None:
        """Close the file."""
        self._batches = iter(())
        self._rest = None
        self._close()

    def _table(self, batch: pa.RecordBatch) -> pa.Table:
        errors = self._row_errors(batch)
        arrays = [self._array(batch, field, errors) for field in self._schema]
        # A dictionary is as large for a part of the rows.
        num_bytes = sum(array.nbytes for array in arrays if not isinstance(array, pa.DictionaryArray))
        if num_bytes > TABLE_BYTES and batch.num_rows > 1:
            raise MemoryError
        return pa.Table.from_arrays(arrays, schema=self._schema)

    def _array(self, batch: pa.RecordBatch, field: pa.Field[Any], errors: dict[int, RowError]) -> pa.Array[Any]:
        if field.name in self._names:
            array = without_rows(batch.column(field.name), errors)
        else:
            array = pa.nulls(batch.num_rows, field.type)
        return cast_or_convert(array, lambda: to_python(array, ()), field)

    def _row_errors(self, batch: pa.RecordBatch) -> dict[int, RowError]:
        errors: dict[int, RowError] = {}
        for name in self._names:
            try:
                bad = invalid_text_rows(batch.column(name))
            except pa.ArrowInvalid as error:
                raise InputError(f"{self._file.path}: column {name!r} is damaged ({error}); write it again") from error
            for index in bad:
                errors.setdefault(index, RowError("invalid_utf8", f"column {name!r} holds bytes that are not UTF-8"))
        return errors

    def _rows_too_long(self, batch: pa.RecordBatch) -> list[int]:
        # The columns that are read count. Mostly the whole batch is smaller than one row may be.
        if batch.num_columns == 0 or batch.nbytes <= self._max_row_bytes:
            return []
        return [
            index
            for index in range(batch.num_rows)
            if sum(value_bytes(column.slice(index, 1)) for column in batch.columns) > self._max_row_bytes
        ]

    def _slices(self, start: int, stop: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        stop = min(stop, self._file.num_rows)
        if start >= stop:
            return
        if self._at is None or self._at > start or not self._is_near(self._at, start):
            self._at, self._batches = self._seek(start)
            self._rest = None
        while self._at < stop:
            batch = self._take()
            first, end = self._at, self._at + batch.num_rows
            if end > stop:
                self._rest = batch.slice(stop - first)
                end = stop
            self._at = end
            for at in range(max(first, start), end, TABLE_ROWS):
                yield at, batch.slice(at - first, min(TABLE_ROWS, end - at))

    def _take(self) -> pa.RecordBatch:
        batch, self._rest = self._rest, None
        batch = batch or next(self._batches, None)
        if batch is None:
            raise InputError(f"{self._file.path}: has fewer rows than it had when the plan was made; put it back")
        return batch


def _in_memory(batch: pa.RecordBatch, make: Callable[[pa.RecordBatch], Made]) -> Iterator[Made]:
    """What is made of a batch, or of each half of it where the whole takes more memory than there is, and so on.

    Dictionaries, views and shared lists may say one long value for every row. MemoryError where a single row is too
    large.
    """
    try:
        made = make(batch)
    except MemoryError:
        if batch.num_rows <= 1:
            raise
        made = None
    if made is not None:
        yield made
        return
    middle = batch.num_rows // 2
    yield from _in_memory(batch.slice(0, middle), make)
    yield from _in_memory(batch.slice(middle), make)
