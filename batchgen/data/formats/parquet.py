"""Parquet: planned from its footer, read a small batch at a time; columns are found by their exact names."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.data.arrow_types import unify
from batchgen.data.batch_cursor import BatchCursor, BatchesFrom
from batchgen.data.file_identity import file_identity
from batchgen.data.input_rows import (
    InputFile,
    ScannedFile,
    UnfoldsTooFar,
    refuse_names_twice,
    schema_from_json,
    schema_to_json,
)
from batchgen.errors import InputError

_BATCH_ROWS = 1024
_BATCH_BYTES = 16 * 2**20
_READ_BUFFER_BYTES = 2**20


class ParquetFormat:
    """Apache Parquet."""

    def scan(self, file: InputFile, max_row_bytes: int) -> ScannedFile:
        """Read the footer; no row is decoded."""
        with file_identity(file.path) as identity:
            reader = _open(file.path)
            schema = reader.schema_arrow
            num_rows = reader.metadata.num_rows
            reader.close()
        refuse_names_twice(file.path, schema.names)
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

    def open(self, file: ScannedFile, schema: pa.Schema, max_row_bytes: int) -> BatchCursor:
        """Open for the columns of `schema`."""
        path = Path(file.path)
        reader = _open(path)
        own = reader.schema_arrow.names
        names = [name for name in schema.names if name in own]
        groups = _RowGroups(path, reader, names)
        return BatchCursor(file, schema, names, groups.seek, groups.is_near, reader.close, max_row_bytes)


class _RowGroups:
    """The row groups of an open file."""

    def __init__(self, path: Path, reader: pq.ParquetFile, names: list[str]) -> None:
        self._path = path
        self._reader = reader
        self._names = names
        metadata = reader.metadata
        self._groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        self._starts = list(accumulate((group.num_rows for group in self._groups), initial=0))
        self._is_row_by_row = False
        """Since a batch took more memory than there is. Sizes in the footer tell nothing of it: a page of a few bytes
        may repeat one long value for every row."""

    def seek(self, row: int) -> BatchesFrom:
        """Batches from the start of the row's group."""
        first = self._group_of(row)
        return BatchesFrom(self._starts[first], self._bounded(first))

    def is_near(self, at: int, row: int) -> bool:
        """Whether `row` is in the group of `at` or in the next one."""
        return self._group_of(row) <= self._group_of(at) + 1

    def _group_of(self, row: int) -> int:
        return bisect_right(self._starts, row) - 1

    def _bounded(self, group: int) -> Iterator[pa.RecordBatch]:
        """The batches from the start of a group; row by row where a batch takes more memory than there is."""
        at = self._starts[group]
        try:
            for batch in self._batches(group):
                yield batch
                at += batch.num_rows
            return
        except UnfoldsTooFar:
            if self._is_row_by_row:
                raise
        # Not in the handler: the error would hold what the first reader had decoded.
        self._is_row_by_row = True
        again = self._group_of(at)
        yield from islice(self._batches(again), at - self._starts[again], None)

    def _batches(self, group: int) -> Iterator[pa.RecordBatch]:
        groups = self._groups[group:]
        row_bytes = max((each.total_byte_size // max(1, each.num_rows) for each in groups), default=1)
        batches = self._reader.iter_batches(
            batch_size=1 if self._is_row_by_row else max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, row_bytes))),
            row_groups=list(range(group, len(self._groups))),
            # A name with dots may take a struct's fields along; the cursor picks columns by their exact name.
            columns=self._names,
            use_threads=False,
        )
        row = self._starts[group]
        while True:
            with _damage_named(self._path, f"row {row}"):
                batch = next(batches, None)
            if batch is None:
                return
            row += batch.num_rows
            yield batch


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
    except MemoryError as error:
        raise UnfoldsTooFar(path, where) from error
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
