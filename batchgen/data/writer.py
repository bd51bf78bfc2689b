"""Shards on their way to disk: a temporary file, written, synced, opened again and checked."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen import __version__
from batchgen.data.file_backend import WritableFile
from batchgen.data.files import OutputFiles
from batchgen.errors import OutputUnavailable
from batchgen.records import RowRange

ROW_GROUP_BYTES = 100 * 10**6
_SUMMARY_KEY = b"batchgen.shard"


@dataclass(frozen=True, slots=True)
class ShardSummary:
    """What one shard file holds; stored in its footer, so a file tells what it is without its record."""

    number: int
    ranges: tuple[RowRange, ...]
    fingerprint: str
    attempt: str
    """The run that wrote the file."""
    rows: int
    """Input rows: ok and error."""
    rows_out: int
    """Rows of the file; more than `rows` where samples are exploded."""
    errors: dict[str, int]
    """Error rows by code."""
    prompt_tokens: int
    completion_tokens: int
    kv_tokens: int = 0
    """Tokens that the KV cache held when the rows were generated; tells whether `kv_capacity` is worth another try."""

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` gives back an equal summary."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return fields | {"ranges": [list(each) for each in self.ranges]}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ShardSummary:
        """Inverse of `to_json`; raises KeyError, TypeError or ValueError for anything else."""
        ranges = tuple(RowRange(*map(int, each)) for each in value["ranges"])
        return cls(**{name: value[name] for name in cls.__slots__} | {"ranges": ranges})


class WrittenShard(NamedTuple):
    """A complete, synced file under a temporary name."""

    path: Path
    summary: ShardSummary
    num_bytes: int
    sha256: str


class _Sink(io.RawIOBase):
    """Collects what pyarrow writes; the file is written between row groups, so no error has to cross C++."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._pieces.append(bytes(data))
        return len(data)

    def drain(self) -> bytes:
        """Take what was collected."""
        content = b"".join(self._pieces)
        self._pieces.clear()
        return content


class _HashedFile:
    """A new file that keeps the hash and the size of its content."""

    def __init__(self, file: WritableFile) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.num_bytes = 0

    def write(self, data: bytes) -> None:
        self._hash.update(data)
        self.num_bytes += len(data)
        self._file.write(data)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


class ParquetShardWriter:
    """Write shards of one schema as zstd Parquet files under temporary names."""

    def __init__(self, files: OutputFiles, schema: pa.Schema, row_group_bytes: int = ROW_GROUP_BYTES) -> None:
        self.files = files
        self.schema = schema
        self.row_group_bytes = row_group_bytes

    def write(self, path: Path, summary: ShardSummary, tables: Iterable[pa.Table]) -> WrittenShard:
        """Write, sync and check a new file; one row group for each table.

        On an error the file is removed if it can be, and never synced again: after a failed sync nobody knows what
        of it is on the disk.
        """
        file = self.files.create(path)
        hashed = _HashedFile(file)
        try:
            self._write_tables(hashed, summary, tables)
            file.sync()
            file.close()
            written = WrittenShard(path, summary, hashed.num_bytes, hashed.hexdigest())
            self._check(written)
        except BaseException:
            with suppress(OutputUnavailable):
                file.close()
            with suppress(OutputUnavailable):
                self.files.unlink(path)
            raise
        return written

    def _write_tables(self, file: _HashedFile, summary: ShardSummary, tables: Iterable[pa.Table]) -> None:
        own = {_SUMMARY_KEY: json.dumps(summary.to_json()).encode(), b"batchgen.version": __version__.encode()}
        schema = self.schema.with_metadata((self.schema.metadata or {}) | own)
        sink = _Sink()
        with pq.ParquetWriter(pa.PythonFile(sink, "w"), schema, compression="zstd", write_page_checksum=True) as writer:
            for table in tables:
                writer.write_table(table.replace_schema_metadata(schema.metadata), row_group_size=max(1, len(table)))
                file.write(sink.drain())
        file.write(sink.drain())

    def _check(self, written: WrittenShard) -> None:
        """Read the footer back, from the file."""
        found = read_footer(self.files, written.path)
        expected = (written.summary, written.num_bytes)
        if found is None or (found.summary, found.num_bytes) != expected or not found.schema.equals(self.schema):
            raise OutputUnavailable(f"{written.path}: reads back other than it was written; check the disk")


class Footer(NamedTuple):
    """What a shard file says of itself."""

    summary: ShardSummary
    schema: pa.Schema
    num_bytes: int


def read_footer(files: OutputFiles, path: Path) -> Footer | None:
    """Summary and schema of a shard file; None where it is no whole shard of batchgen.

    Raises FileNotFoundError where there is no file.
    """
    with files.open_read(path) as file:
        try:
            parquet = pq.ParquetFile(file)
            metadata = parquet.schema_arrow.metadata or {}
            summary = ShardSummary.from_json(json.loads(metadata[_SUMMARY_KEY]))
        except (pa.ArrowInvalid, OSError, KeyError, TypeError, ValueError):
            return None
        if parquet.metadata.num_rows != summary.rows_out:
            return None
        num_bytes = file.seek(0, 2)
        return Footer(summary, parquet.schema_arrow, num_bytes)
