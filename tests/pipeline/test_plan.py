"""Planning is arithmetic over ranges; a brute-force set of rows is its oracle."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from batchgen.data.commits import ShardFile
from batchgen.data.input_rows import ScannedFile
from batchgen.data.writer import ShardSummary
from batchgen.pipeline.plan import (
    RowIndex,
    covered,
    gaps,
    incompleteness,
    keys_of,
    limited,
    plan_shards,
    ranges_of,
)
from batchgen.records import RowRange, Shard


def scanned(source: int, num_rows: int, blank: set[int]) -> ScannedFile:
    skipped = tuple((rows.start, rows.stop) for rows in ranges_of((source, row) for row in sorted(blank)))
    return ScannedFile(
        source, f"{source}", f"{source}", "jsonl", None, 0, 0, 0, "", num_rows, columns={}, skipped=skipped
    )


@st.composite
def inputs(draw: st.DrawFn) -> tuple[RowIndex, list[RowRange]]:
    """Some files with blank lines here and there, and their ranges."""
    files = []
    for source in range(draw(st.integers(1, 3))):
        num_rows = draw(st.integers(0, 12))
        blank = draw(st.sets(st.integers(0, num_rows - 1))) if num_rows and draw(st.booleans()) else set()
        files.append(scanned(source, num_rows, blank))
    return RowIndex(files), [RowRange(file.source, 0, file.num_rows) for file in files]


@given(inputs(), st.integers(0, 30))
def test_limit_keeps_the_first_rows(world: tuple[RowIndex, list[RowRange]], limit: int) -> None:
    index, ranges = world
    kept = limited(ranges, limit, index)
    assert list(keys_of(kept, index)) == list(keys_of(ranges, index))[:limit]
    assert limited(ranges, None, index) == ranges


@given(inputs(), st.integers(1, 7), st.integers(0, 3))
def test_shards_hold_every_row_once_in_order_and_are_full(
    world: tuple[RowIndex, list[RowRange]], shard_rows: int, first: int
) -> None:
    index, ranges = world
    shards = plan_shards(ranges, shard_rows, first, index)
    keys = [list(keys_of(shard.ranges, index)) for shard in shards]
    assert [key for shard in keys for key in shard] == list(keys_of(ranges, index))
    assert all(len(shard) == shard_rows for shard in keys[:-1])
    assert all(0 < len(shard) <= shard_rows for shard in keys)
    assert [shard.number for shard in shards] == list(range(first, first + len(shards)))


@given(inputs(), st.integers(1, 5), st.sets(st.integers(0, 30)), st.integers(1, 5))
def test_what_is_left_is_planned_anew_without_touching_what_is_done(
    world: tuple[RowIndex, list[RowRange]], shard_rows: int, chosen: set[int], other_rows: int
) -> None:
    index, ranges = world
    done = [shard for shard in plan_shards(ranges, shard_rows, 0, index) if shard.number in chosen]
    left = gaps(ranges, [rows for shard in done for rows in shard.ranges])
    rest = plan_shards(left, other_rows, 100, index)
    keys = [key for shard in (*done, *rest) for key in keys_of(shard.ranges, index)]
    assert sorted(keys) == list(keys_of(ranges, index))


@given(st.sets(st.tuples(st.integers(0, 2), st.integers(0, 20))))
def test_ranges_hold_exactly_their_keys(keys: set[tuple[int, int]]) -> None:
    ranges = ranges_of(sorted(keys))
    assert [(rows.source, row) for rows in ranges for row in range(rows.start, rows.stop)] == sorted(keys)
    assert all(one.source != other.source or one.stop < other.start for one, other in itertools.pairwise(ranges))


def committed(shard: Shard, num_rows: int) -> ShardFile:
    return ShardFile(ShardSummary(shard.number, shard.ranges, "f", "a", num_rows, num_rows, {}, 0, 0), 1, "")


@given(inputs(), st.integers(1, 5), st.integers(0, 20))
def test_a_missing_or_miscounted_shard_is_noticed(
    world: tuple[RowIndex, list[RowRange]], shard_rows: int, chosen: int
) -> None:
    index, ranges = world
    shards = plan_shards(ranges, shard_rows, 0, index)
    files = [committed(shard, len(list(keys_of(shard.ranges, index)))) for shard in shards]
    assert incompleteness(ranges, files, index) is None
    if files:
        lost = files.pop(chosen % len(files))
        assert "are not committed" in str(incompleteness(ranges, files, index))
        files.append(committed(Shard(lost.summary.number, lost.summary.ranges), lost.summary.rows + 1))
        assert "rows went in" in str(incompleteness(ranges, files, index))


def test_small_files_share_a_shard() -> None:
    index = RowIndex([scanned(source, 2, set()) for source in range(3)])
    shards = plan_shards([RowRange(source, 0, 2) for source in range(3)], 4, 0, index)
    assert shards == [
        Shard(0, (RowRange(0, 0, 2), RowRange(1, 0, 2))),
        Shard(1, (RowRange(2, 0, 2),)),
    ]
    assert covered(committed(shard, 4) for shard in shards) == [RowRange(source, 0, 2) for source in range(3)]


def test_a_file_of_blank_lines_makes_no_shard() -> None:
    index = RowIndex([scanned(0, 3, {0, 1, 2})])
    assert plan_shards([RowRange(0, 0, 3)], 4, 0, index) == []
    assert incompleteness([RowRange(0, 0, 3)], [], index) is None
