"""Arrow IPC, as a file or as a stream: planned and read a record batch at a time, without copying it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import pyarrow as pa

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

_FILE_MAGIC = b"ARROW1"


class ArrowFormat:
    """Arrow's IPC formats; Feather of version 2 is one of them, and so are the files that `datasets` saves."""

    def scan(self, file: InputFile, max_row_bytes: int) -> ScannedFile:
        """Read the sizes of all batches."""
        with file_identity(file.path) as identity:
            reader = _Reader(file.path)
            schema = reader.schema
            batch_rows = [batch.num_rows for batch in reader.batches(0)]
            reader.close()
        refuse_names_twice(file.path, schema.names)
        return ScannedFile(
            source=file.source,
            path=str(file.path),
            name=file.name,
            format="arrow",
            compression=None,
            size=identity.size,
            mtime_ns=identity.mtime_ns,
            inode=identity.inode,
            sha256=identity.sha256,
            num_rows=sum(batch_rows),
            columns={"schema": schema_to_json(schema.remove_metadata()), "batch_rows": batch_rows},
        )

    def columns_of(self, files: Sequence[ScannedFile]) -> pa.Schema:
        """Every column of the files, each with a type that holds its values in all of them."""
        return unify(schema_from_json(file.columns["schema"]) for file in files)

    def open(self, file: ScannedFile, schema: pa.Schema, max_row_bytes: int) -> BatchCursor:
        """Open for the columns of `schema`."""
        reader = _Reader(Path(file.path))
        names = [name for name in schema.names if name in reader.schema.names]
        starts = list(accumulate(file.columns["batch_rows"], initial=0))

        def seek(row: int) -> BatchesFrom:
            index = bisect_right(starts, row) - 1
            return BatchesFrom(starts[index], reader.batches(index))

        def is_near(at: int, row: int) -> bool:
            return bisect_right(starts, row) <= bisect_right(starts, at) + 1

        return BatchCursor(file, schema, names, seek, is_near, reader.close, max_row_bytes)


class _Reader:
    """An open file of either kind."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _damage_named(path):
            if path.stat().st_size == 0:
                raise InputError(f"{path}: is empty (0 bytes), and no Arrow file; write it again or leave it out")
            with path.open("rb") as file:
                self._is_file = file.read(len(_FILE_MAGIC)) == _FILE_MAGIC
            self._source = pa.memory_map(str(path))
            self._file = pa.ipc.open_file(self._source) if self._is_file else None
            self.schema = pa.ipc.open_stream(self._source).schema if self._file is None else self._file.schema

    def batches(self, first: int) -> Iterator[pa.RecordBatch]:
        """Batches from the one with this index on; those of a stream that come before are passed over."""
        index = 0 if self._file is None else first
        with _damage_named(self._path):
            if self._file is None:
                self._source.seek(0)
                stream = iter(pa.ipc.open_stream(self._source))
        while self._file is None or index < self._file.num_record_batches:
            with _damage_named(self._path, f"record batch {index}"):
                batch = next(stream, None) if self._file is None else self._file.get_batch(index)
            if batch is None:
                return
            if index >= first:
                yield batch
            index += 1

    def close(self) -> None:
        """Unmap the file."""
        self._source.close()


@contextmanager
def _damage_named(path: Path, where: str = "start") -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        raise UnfoldsTooFar(path, where) from error
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: is no Arrow IPC file or stream, or a cut or damaged one ({error})") from error
