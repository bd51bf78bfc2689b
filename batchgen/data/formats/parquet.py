"""Parquet: planned from its footer, read a small batch at a time; columns are found by their exact names."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.data.arrow_types import cast_or_convert, unify
from batchgen.data.file_identity import file_identity
from batchgen.data.input_rows import InputFile, InputRow, ScannedFile, schema_from_json, schema_to_json
from batchgen.data.python_values import invalid_text_rows, to_python, without_rows
from batchgen.errors import InputError
from batchgen.records import RowError

_BATCH_ROWS = 1024
_BATCH_BYTES = 16 * 2**20
_READ_BUFFER_BYTES = 2**20
_MAGIC = b"PAR1"


class ParquetFormat:
    """Apache Parquet."""

    def scan(self, file: InputFile, max_row_bytes: int) -> ScannedFile:
        """Read the footer; no row is decoded."""
        with file_identity(file.path) as identity:
            reader = _open(file.path)
            schema = reader.schema_arrow
            num_rows = reader.metadata.num_rows
            reader.close()
        _check_names(file.path, schema.names)
        return ScannedFile(
            source=file.source,
            path=str(file.path),
            name=file.name,
            format="parquet",
            compression=None,
            size=identity.size,
            mtime_ns=identity.mtime_ns,
            inode=identity.inode,
            sha256=_footer_hash(file.path, identity.size),
            num_rows=num_rows,
            columns={"schema": schema_to_json(schema.remove_metadata())},
        )

    def columns_of(self, files: Sequence[ScannedFile]) -> pa.Schema:
        """Every column of the files, each with a type that holds its values in all of them."""
        return unify(schema_from_json(file.columns["schema"]) for file in files)

    def open(self, file: ScannedFile, schema: pa.Schema, max_row_bytes: int) -> ParquetCursor:
        """Open for the columns of `schema`."""
        return ParquetCursor(file, schema)


class ParquetCursor:
    """An open Parquet file."""

    def __init__(self, file: ScannedFile, schema: pa.Schema) -> None:
        self._file = file
        self._schema = schema
        self._path = Path(file.path)
        self._reader = _open(self._path)
        own = self._reader.schema_arrow
        self._names = [name for name in schema.names if name in own.names]
        metadata = self._reader.metadata
        self._groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        self._group_starts = list(accumulate((group.num_rows for group in self._groups), initial=0))
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._rest: pa.RecordBatch | None = None
        self._at = -1

    def rows(self, start: int, stop: int) -> Iterator[InputRow]:
        """The rows of a half-open range, in order."""
        for first, batch in self._slices(start, stop):
            errors = _row_errors(batch)
            columns = {name: to_python(batch.column(name), errors) for name in self._names}
            missing = [name for name in self._schema.names if name not in columns]
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
            errors = _row_errors(batch)
            arrays = [self._array(batch, field, errors) for field in self._schema]
            if arrays:
                yield pa.Table.from_arrays(arrays, schema=self._schema)

    def _array(self, batch: pa.RecordBatch, field: pa.Field[Any], errors: dict[int, RowError]) -> pa.Array[Any]:
        if field.name in self._names:
            array = without_rows(batch.column(field.name), errors)
        else:
            array = pa.nulls(batch.num_rows, field.type)
        return cast_or_convert(array, lambda: to_python(array, {}), field)

    def close(self) -> None:
        """Close the file."""
        self._batches = iter(())
        self._reader.close()

    def _slices(self, start: int, stop: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        stop = min(stop, self._file.num_rows)
        if start >= stop:
            return
        if not 0 <= self._at <= start or self._group_of(start) > self._group_of(self._at) + 1:
            self._seek(start)
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
        if batch is not None:
            return batch
        with _damage_named(self._path, f"row {self._at}"):
            batch = next(self._batches, None)
        if batch is None:
            raise InputError(f"{self._path}: has fewer rows than its footer says; write it again")
        return batch

    def _group_of(self, row: int) -> int:
        return bisect_right(self._group_starts, row) - 1

    def _seek(self, row: int) -> None:
        first = self._group_of(row)
        groups = self._groups[first:]
        row_bytes = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=1)
        self._batches = self._reader.iter_batches(
            batch_size=max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, row_bytes))),
            row_groups=list(range(first, len(self._groups))),
            # A name with dots may take a struct's fields along; rows and tables pick columns by their exact name.
            columns=self._names,
            use_threads=False,
        )
        self._rest = None
        self._at = self._group_starts[first]


def _row_errors(batch: pa.RecordBatch) -> dict[int, RowError]:
    errors: dict[int, RowError] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        for index in invalid_text_rows(column):
            errors.setdefault(index, RowError("invalid_utf8", f"column {name!r} holds bytes that are not UTF-8"))
    return errors


def _check_names(path: Path, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"{path}: has more than one column named {', '.join(map(repr, twice))}; rename all but one")


def _open(path: Path) -> pq.ParquetFile:
    with _damage_named(path, "footer"):
        if path.stat().st_size == 0:
            raise InputError(f"{path}: is empty (0 bytes), and no Parquet file; write it again or leave it out")
        # The buffer bounds memory by a page rather than by a row group.
        return pq.ParquetFile(path, pre_buffer=False, buffer_size=_READ_BUFFER_BYTES, page_checksum_verification=True)


@contextmanager
def _damage_named(path: Path, where: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: {where}: is no Parquet file, or a cut or damaged one ({error})") from error


def _footer_hash(path: Path, size: int) -> str:
    """Hash of size and footer: what tells one content of a Parquet file from another without reading it whole."""
    with path.open("rb") as file:
        file.seek(-8, 2)
        tail = file.read()
        length = int.from_bytes(tail[:4], "little")
        file.seek(-8 - length, 2)
        return hashlib.sha256(b"%d:" % size + file.read()).hexdigest()
