"""Rows of an output as they lie in its committed files: in order, by identity, by chance, by an expression."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.data.commits import ShardFile, replay
from batchgen.data.rows import RowKey
from batchgen.pipeline.bounded_filter import BoundedFilter
from batchgen.pipeline.stored import StoredOutput

Row = dict[str, Any]
"""One row of the output: its columns by name."""


def committed_files(stored: StoredOutput) -> dict[int, ShardFile]:
    """The committed files by number; raises OutputDamaged where the records contradict each other."""
    return dict(sorted(replay(stored.log.records, stored.plan.fingerprint).shards.items()))


def key_of(row: Row, stored: StoredOutput) -> RowKey:
    """(source, row) of a row of the output."""
    record = row[stored.layout.struct_name]
    return record["source"], record["row"]


def batches(
    stored: StoredOutput, columns: Sequence[str] | None = None, numbers: Iterable[int] | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows in order, a piece at a time; memory stays flat. `numbers` chooses files."""
    for number in committed_files(stored) if numbers is None else numbers:
        with stored.files.open_read(stored.paths.shard(number)) as file:
            names = None if columns is None else list(columns)
            yield from pq.ParquetFile(file).iter_batches(batch_size=4096, columns=names)


def rows(stored: StoredOutput, numbers: Iterable[int] | None = None) -> Iterator[Row]:
    """The rows in order, with all their columns."""
    for batch in batches(stored, numbers=numbers):
        yield from batch.to_pylist()


def chosen_rows(stored: StoredOutput, where: str) -> Iterator[Row]:
    """The rows for which an expression is true; raises JobError where it is wrong.

    Columns that the expression does not name are read only of the pieces that hold such a row.
    """
    with closing(BoundedFilter(where, stored.schema.names)) as row_filter:
        for batch in batches(stored):
            narrow = batch.select(row_filter.columns) if row_filter.columns else batch
            for index, is_chosen in enumerate(row_filter.choose(narrow.to_pylist())):
                if is_chosen:
                    yield batch.slice(index, 1).to_pylist()[0]


def rows_of_keys(stored: StoredOutput, keys: Iterable[RowKey]) -> Iterator[Row]:
    """The committed rows of some input rows, in order; one that is not committed is passed over."""
    wanted = set(keys)
    struct = stored.layout.struct_name
    for number, shard in committed_files(stored).items():
        here = {key for key in wanted for rows in shard.summary.ranges if _holds(rows, key)}
        if not here:
            continue
        for batch in batches(stored, numbers=[number]):
            records: Any = batch.column(struct)
            keys = zip(records.field("source").to_pylist(), records.field("row").to_pylist(), strict=True)
            for index, key in enumerate(keys):
                if key in here:
                    yield batch.slice(index, 1).to_pylist()[0]


def rows_with_values(stored: StoredOutput, column: str, texts: Iterable[str]) -> Iterator[Row]:
    """The rows whose value in a column is written as one of these texts, in order."""
    wanted = set(texts)
    for number in committed_files(stored):
        values = [value for batch in batches(stored, [column], [number]) for value in batch.column(0).to_pylist()]
        here = [index for index, value in enumerate(values) if str(value) in wanted]
        if here:
            with stored.files.open_read(stored.paths.shard(number)) as file:
                yield from _at(pq.ParquetFile(file), here)


def random_rows(stored: StoredOutput, count: int, seed: int | str) -> list[Row]:
    """`count` rows drawn without replacement, in order; the same ones for the same seed and output."""
    sizes = {number: shard.summary.rows_out for number, shard in committed_files(stored).items()}
    total = sum(sizes.values())
    drawn = sorted(random.Random(seed).sample(range(total), min(count, total)))
    found: list[Row] = []
    start = 0
    for number, size in sizes.items():
        here = [position - start for position in drawn if start <= position < start + size]
        if here:
            with stored.files.open_read(stored.paths.shard(number)) as file:
                found += _at(pq.ParquetFile(file), here)
        start += size
    return found


def _holds(rows: tuple[int, int, int], key: RowKey) -> bool:
    source, start, stop = rows
    return source == key[0] and start <= key[1] < stop


def _at(file: pq.ParquetFile, positions: list[int]) -> Iterator[Row]:
    """Rows by position in the file; only the row groups that hold them are read."""
    start = 0
    for group in range(file.num_row_groups):
        size = file.metadata.row_group(group).num_rows
        here = [position - start for position in positions if start <= position < start + size]
        if here:
            table = file.read_row_group(group)
            for index in here:
                yield table.slice(index, 1).to_pylist()[0]
        start += size
