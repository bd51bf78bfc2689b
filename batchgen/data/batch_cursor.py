"""Rows out of Arrow record batches: what the columnar formats have in common."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import pyarrow as pa

from batchgen.data.arrow_types import cast_or_convert
from batchgen.data.input_rows import InputRow, ScannedFile
from batchgen.data.python_values import invalid_text_rows, to_python, without_rows
from batchgen.errors import InputError
from batchgen.records import RowError


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

    def rows(self, start: int, stop: int) -> Iterator[InputRow]:
        """The rows of a half-open range, in order."""
        missing = [name for name in self._schema.names if name not in self._names]
        for first, batch in self._slices(start, stop):
            errors = self._row_errors(batch)
            # Of what is carried through nothing is dropped for its size: that row may well have an answer.
            for index in self._rows_too_long(batch):
                errors.setdefault(index, RowError("row_too_long", "the row is larger than the limit for one row"))
            columns = {name: to_python(batch.column(name), errors) for name in self._names}
            for index in range(batch.num_rows):
                error = errors.get(index)
                values: dict[str, Any] = {}
                if error is None:
                    values = {name: column[index] for name, column in columns.items()}
                    values.update(dict.fromkeys(missing))
                yield InputRow(self._file.source, first + index, values, error)

    def tables(self, start: int, stop: int) -> Iterator[pa.Table]:
        """The same rows as Arrow data with their exact types, a batch at a time; a row with an error is all null."""
        for _, batch in self._slices(start, stop):
            errors = self._row_errors(batch)
            arrays = [self._array(batch, field, errors) for field in self._schema]
            if arrays:
                yield pa.Table.from_arrays(arrays, schema=self._schema)

    def close(self) -> None:
        """Close the file."""
        self._batches = iter(())
        self._rest = None
        self._close()

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
        return [index for index in range(batch.num_rows) if batch.slice(index, 1).nbytes > self._max_row_bytes]

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
            if end > start:
                skipped = max(0, start - first)
                yield first + skipped, batch.slice(skipped, end - first - skipped)

    def _take(self) -> pa.RecordBatch:
        batch, self._rest = self._rest, None
        batch = batch or next(self._batches, None)
        if batch is None:
            raise InputError(f"{self._file.path}: has fewer rows than it had when the plan was made; put it back")
        return batch
