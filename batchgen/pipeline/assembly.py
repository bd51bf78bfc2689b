"""Rows become shards: finished rows are collected until a shard is whole, then written and committed."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

import pyarrow as pa

from batchgen.data.commits import ShardFile
from batchgen.data.merge import merge_rows
from batchgen.data.rows import FinishedRow, RowKey
from batchgen.data.schema import OutputLayout
from batchgen.data.table import output_tables, rows_out
from batchgen.data.writer import ParquetShardWriter, ShardSummary, WrittenShard
from batchgen.pipeline.plan import RowIndex, keys_of, ranges_of
from batchgen.records import RowRange, Shard

ReadColumns = Callable[[RowRange], Iterable[pa.Table]]
"""The columns carried through for a range of rows, a piece at a time."""


class WholeShard(NamedTuple):
    """A shard with the answers of all its rows, in input order."""

    shard: Shard
    rows: list[FinishedRow]


class _OpenShard(NamedTuple):
    """A shard whose rows are being generated."""

    shard: Shard
    keys: list[RowKey]
    finished: dict[RowKey, FinishedRow]


class Temporaries(Protocol):
    """Who writes: the ledger, or a worker."""

    @property
    def attempt(self) -> str:
        """The run that the files belong to."""
        ...

    def temporary(self, name: str) -> Path:
        """A path in tmp/ that nobody else uses."""
        ...


class ShardBuilder:
    """Joins finished rows with their source columns and writes them as one temporary file."""

    def __init__(
        self,
        temporaries: Temporaries,
        writer: ParquetShardWriter,
        layout: OutputLayout,
        fingerprint: str,
        columns: ReadColumns,
        kv_tokens: Callable[[], int],
    ) -> None:
        """`kv_tokens` says how many tokens the KV cache holds with which rows are generated now."""
        self._temporaries = temporaries
        self._writer = writer
        self._layout = layout
        self._fingerprint = fingerprint
        self._columns = columns
        self._kv_tokens = kv_tokens

    def write(self, whole: WholeShard) -> WrittenShard:
        """Write a new temporary file."""
        return self._writer.write(self._path(whole.shard), self._summary(*whole), self._tables(whole))

    def write_merged(self, whole: WholeShard, old_summary: ShardSummary, old: pa.Table) -> WrittenShard:
        """Write a new temporary file with these rows in the place of the old ones, and all others as they are."""
        max_bytes = self._writer.row_group_bytes
        keys = {row.key for row in whole.rows}
        merged = merge_rows(old, self._tables(whole), keys, self._layout.struct_name, max_bytes)
        summary = replace(
            old_summary,
            rows_out=merged.rows_out,
            errors=merged.errors,
            prompt_tokens=merged.prompt_tokens,
            completion_tokens=merged.completion_tokens,
            kv_tokens=self._kv_tokens(),
        )
        return self._writer.write(self._path(whole.shard), summary, merged.tables)

    def _path(self, shard: Shard) -> Path:
        return self._temporaries.temporary(f"part-{shard.number:05d}.parquet")

    def _tables(self, whole: WholeShard) -> Iterator[pa.Table]:
        source = (table for each in whole.shard.ranges for table in self._columns(each))
        max_bytes = self._writer.row_group_bytes
        return output_tables(source, whole.rows, self._layout, self._writer.schema, max_bytes)

    def _summary(self, shard: Shard, rows: list[FinishedRow]) -> ShardSummary:
        errors: dict[str, int] = {}
        for row in rows:
            if row.error is not None:
                errors[row.error.code] = errors.get(row.error.code, 0) + 1
        return ShardSummary(
            number=shard.number,
            ranges=shard.ranges,
            fingerprint=self._fingerprint,
            attempt=self._temporaries.attempt,
            rows=len(rows),
            rows_out=rows_out(rows, self._layout),
            errors=errors,
            prompt_tokens=sum(row.prompt_tokens or 0 for row in rows),
            completion_tokens=sum(row.completion_tokens for row in rows),
            kv_tokens=self._kv_tokens(),
        )


class Assembly:
    """The shards of a run, in order: planned, open while their rows are generated, and then whole.

    Rows enter with `expect`, in input order, and leave with `finish`, in any order.
    """

    def __init__(self, shards: Iterable[Shard], index: RowIndex, known: Mapping[RowKey, FinishedRow]) -> None:
        """`known` are rows that an earlier run finished; every shard has some that are not."""
        self._planned = deque(shards)
        self._index = index
        self._known = known
        self._open: dict[int, _OpenShard] = {}
        self._shard_of: dict[RowKey, int] = {}

    @property
    def num_open(self) -> int:
        """Shards whose rows are held in memory."""
        return len(self._open)

    @property
    def is_done(self) -> bool:
        """Whether every shard has become whole."""
        return not self._planned and not self._open

    def add(self, shard: Shard) -> None:
        """Plan one more shard, behind the others."""
        self._planned.append(shard)

    def opens_a_shard(self, key: RowKey) -> bool:
        """Whether expecting this row would open another shard."""
        return key not in self._shard_of

    def expect(self, key: RowKey) -> None:
        """A row is about to be generated."""
        while key not in self._shard_of:
            shard = self._planned.popleft()
            keys = list(keys_of(shard.ranges, self._index))
            finished = {each: self._known[each] for each in keys if each in self._known}
            self._open[shard.number] = _OpenShard(shard, keys, finished)
            self._shard_of.update((each, shard.number) for each in keys if each not in finished)

    def finish(self, row: FinishedRow) -> WholeShard | None:
        """Take the answer of an expected row; returns its shard if that is whole now."""
        number = self._shard_of.pop(row.key)
        shard, keys, finished = self._open[number]
        finished[row.key] = row
        if len(finished) < len(keys):
            return None
        del self._open[number]
        return WholeShard(shard, [finished[key] for key in keys])


def known_shards(
    shards: Iterable[Shard], index: RowIndex, known: Mapping[RowKey, FinishedRow]
) -> tuple[list[WholeShard], list[Shard], list[RowRange]]:
    """(shards that earlier runs finished row by row, the other shards, the rows of these that are not finished)."""
    whole: list[WholeShard] = []
    rest: list[Shard] = []
    missing: list[RowRange] = []
    begun = sorted(known)
    for shard in shards:
        # Most shards have no finished row at all: their ranges stay as they are, however many rows they hold.
        if shard.ranges and not any(_holds_one_of(rows, begun) for rows in shard.ranges):
            rest.append(shard)
            missing += shard.ranges
            continue
        keys = list(keys_of(shard.ranges, index))
        if all(key in known for key in keys):
            whole.append(WholeShard(shard, [known[key] for key in keys]))
        else:
            rest.append(shard)
            missing += ranges_of(key for key in keys if key not in known)
    return whole, rest, missing


def _holds_one_of(rows: RowRange, keys: list[RowKey]) -> bool:
    """Whether one of the sorted keys lies in the range."""
    return bisect_left(keys, (rows.source, rows.start)) < bisect_left(keys, (rows.source, rows.stop))


def counts(shards: Iterable[ShardFile]) -> tuple[int, dict[str, int]]:
    """(rows, error rows by code) of committed files."""
    num_rows = 0
    errors: dict[str, int] = {}
    for shard in shards:
        num_rows += shard.summary.rows
        for code, number in shard.summary.errors.items():
            errors[code] = errors.get(code, 0) + number
    return num_rows, errors
