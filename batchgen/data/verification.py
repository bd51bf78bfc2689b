"""Whether a shard file is what its record, or its footer, says: every byte and every key."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, cast

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.data.commits import ShardFile
from batchgen.data.files import OutputFiles
from batchgen.data.rows import RowKey
from batchgen.data.writer import ShardSummary, read_footer
from batchgen.records import RowRange

RowsOf = Callable[[RowRange], Iterable[int]]
"""Physical numbers of the rows in a range: blank lines are in the range, but are no rows."""

_HASH_BYTES = 1 << 20


class FoundShard(NamedTuple):
    """A file that is whole, or what is wrong with it."""

    shard: ShardFile | None
    problem: str | None


def inspect_shard(files: OutputFiles, path: Path, schema: pa.Schema, struct_name: str, rows_of: RowsOf) -> FoundShard:
    """Read a whole shard file and check it against its own footer and the declared schema."""
    status = files.status(path)
    if status is None:
        return FoundShard(None, "is missing")
    if not status.is_regular:
        return FoundShard(None, "is no regular file")
    footer = read_footer(files, path)
    if footer is None:
        return FoundShard(None, "is no whole shard file")
    if not footer.schema.equals(schema):
        return FoundShard(None, "has another schema than this output")
    try:
        problem = _check_rows(files, path, struct_name, footer.summary, rows_of)
    except (pa.ArrowException, OSError) as error:
        problem = f"cannot be read: {error}"
    if problem is not None:
        return FoundShard(None, problem)
    return FoundShard(ShardFile(footer.summary, footer.num_bytes, file_sha256(files, path)), None)


def file_sha256(files: OutputFiles, path: Path) -> str:
    """Hash of a file's content."""
    digest = hashlib.sha256()
    with files.open_read(path) as file:
        while piece := file.read(_HASH_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _check_rows(files: OutputFiles, path: Path, struct_name: str, summary: ShardSummary, rows_of: RowsOf) -> str | None:
    """What is wrong with the rows; None where each row of the ranges is there once, in order, and counted."""
    expected = ((rows.source, row) for rows in summary.ranges for row in rows_of(rows))
    counts: dict[str, int] = {}
    num_rows = num_out = 0
    last: RowKey | None = None
    for key, status, code in _read_keys(files, path, struct_name):
        num_out += 1
        if key == last:
            continue
        if key != next(expected, None):
            return f"has row {key[1]} of source {key[0]} where another row belongs"
        last = key
        num_rows += 1
        if status == "error":
            counts[code or ""] = counts.get(code or "", 0) + 1
    if next(expected, None) is not None or num_rows != summary.rows or num_out != summary.rows_out:
        return f"has {num_rows} rows, but should have {summary.rows}"
    return None if counts == summary.errors else "has other errors than its footer counts"


def _read_keys(files: OutputFiles, path: Path, struct_name: str) -> Iterator[tuple[RowKey, str, str | None]]:
    """(key, status, error code) of every row; every page of the file is read, and its checksum compared."""
    with files.open_read(path) as file:
        parquet = pq.ParquetFile(file, page_checksum_verification=True)
        for batch in parquet.iter_batches():
            fields = cast(pa.StructArray, batch.column(batch.schema.get_field_index(struct_name))).flatten()
            kind = batch.schema.field(struct_name).type
            columns = [
                fields[kind.get_field_index(name)].to_pylist() for name in ("source", "row", "status", "error_code")
            ]
            for source, row, status, code in zip(*columns, strict=True):
                yield (source, row), status, code
