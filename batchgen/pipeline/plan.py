"""Which rows are still to be done, and in which shards: pure functions over the scan and the committed files."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

from batchgen.data.commits import ShardFile
from batchgen.data.input_rows import ScannedFile
from batchgen.data.rows import RowKey
from batchgen.records import RowRange, Shard


class RowIndex:
    """Which physical rows are rows: blank lines have numbers, but are none."""

    def __init__(self, files: Sequence[ScannedFile]) -> None:
        self._files = files

    def numbers(self, rows: RowRange) -> Iterable[int]:
        """The rows of a range, in order."""
        file = self._files[rows.source]
        return file.rows(rows.start, rows.stop) if file.skipped else range(rows.start, min(rows.stop, file.num_rows))

    def count(self, rows: RowRange) -> int:
        """How many rows a range holds."""
        return self._files[rows.source].count_rows(rows.start, rows.stop)

    def first(self, rows: RowRange, count: int) -> RowRange:
        """The shortest range that holds the first `count` rows, blank lines before the first of them left out."""
        assert count > 0
        numbers = self.numbers(rows)
        if isinstance(numbers, range):
            return RowRange(rows.source, numbers[0], numbers[min(count, len(numbers)) - 1] + 1)
        taken = [number for number, _ in zip(numbers, range(count), strict=False)]
        return RowRange(rows.source, taken[0], taken[-1] + 1)


def limited(ranges: Iterable[RowRange], limit: int | None, index: RowIndex) -> list[RowRange]:
    """The ranges that hold the first `limit` rows; all where it is None."""
    if limit is None:
        return list(ranges)
    kept: list[RowRange] = []
    for rows in ranges:
        count = index.count(rows)
        if limit == 0:
            break
        kept.append(rows if count <= limit else index.first(rows, limit)._replace(start=rows.start))
        limit -= min(limit, count)
    return kept


def gaps(ranges: Iterable[RowRange], done: Iterable[RowRange]) -> list[RowRange]:
    """What of `ranges` is not in `done`, in order."""
    by_source: dict[int, list[RowRange]] = {}
    for rows in sorted(done):
        by_source.setdefault(rows.source, []).append(rows)
    left: list[RowRange] = []
    for rows in ranges:
        at = rows.start
        for other in by_source.get(rows.source, ()):
            if at < min(other.start, rows.stop):
                left.append(RowRange(rows.source, at, min(other.start, rows.stop)))
            at = max(at, other.stop)
        if at < rows.stop:
            left.append(RowRange(rows.source, at, rows.stop))
    return left


def plan_shards(left: Iterable[RowRange], shard_rows: int, first_number: int, index: RowIndex) -> list[Shard]:
    """Cut ranges into shards of `shard_rows` rows; a shard may hold ranges of several files. Blank lines make none."""
    shards: list[Shard] = []
    held: list[RowRange] = []
    room = shard_rows
    for whole in left:
        rest, count = whole, index.count(whole)
        while count:
            piece = index.first(rest, min(room, count))
            held.append(piece)
            num_rows = min(room, count)
            rest, count, room = rest._replace(start=piece.stop), count - num_rows, room - num_rows
            if room == 0:
                shards.append(Shard(first_number + len(shards), tuple(held)))
                held, room = [], shard_rows
    if held:
        shards.append(Shard(first_number + len(shards), tuple(held)))
    return shards


def covered(shards: Iterable[ShardFile]) -> list[RowRange]:
    """The ranges of committed files."""
    return [rows for shard in shards for rows in shard.summary.ranges]


def outside(keys: Iterable[RowKey], ranges: Iterable[RowRange]) -> list[RowKey]:
    """The keys that lie in none of the ranges, which do not overlap."""
    ordered = sorted(ranges)
    left = []
    for key in keys:
        at = bisect_right(ordered, (*key, math.inf)) - 1
        if at < 0 or ordered[at].source != key[0] or ordered[at].stop <= key[1]:
            left.append(key)
    return left


def keys_of(ranges: Iterable[RowRange], index: RowIndex) -> Iterator[RowKey]:
    """The rows of some ranges in order."""
    return ((rows.source, number) for rows in ranges for number in index.numbers(rows))


def ranges_of(keys: Iterable[RowKey]) -> list[RowRange]:
    """The fewest ranges that hold exactly these rows, which must be in order."""
    ranges: list[RowRange] = []
    for source, number in keys:
        if ranges and ranges[-1].source == source and ranges[-1].stop == number:
            ranges[-1] = ranges[-1]._replace(stop=number + 1)
        else:
            ranges.append(RowRange(source, number, number + 1))
    return ranges


def incompleteness(expected: Sequence[RowRange], shards: Iterable[ShardFile], index: RowIndex) -> str | None:
    """What is wrong where the committed files do not hold each expected row exactly once; None if they do."""
    committed = list(shards)
    missing = [rows for rows in gaps(expected, covered(committed)) if index.count(rows) > 0]
    if missing:
        return f"rows {missing[0].start} to {missing[0].stop - 1} of source {missing[0].source} are not committed"
    num_expected = sum(index.count(rows) for rows in expected)
    num_committed = sum(shard.summary.rows for shard in committed)
    if num_expected != num_committed:
        return f"{num_expected} rows went in, but {num_committed} are committed"
    return None
