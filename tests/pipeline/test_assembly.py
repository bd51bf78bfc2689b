"""Rows become shards in input order, whatever the order in which they finish."""

from __future__ import annotations

import random

import pytest

from batchgen.data.input_rows import ScannedFile
from batchgen.data.rows import FinishedRow
from batchgen.pipeline.assembly import Assembly, known_shards
from batchgen.pipeline.plan import RowIndex
from batchgen.records import RowRange, Shard

INDEX = RowIndex([ScannedFile(0, "", "", "jsonl", None, 0, 0, 0, "", 9, columns={}, skipped=((4, 5),))])
SHARDS = [Shard(0, (RowRange(0, 0, 3),)), Shard(1, (RowRange(0, 3, 7),)), Shard(2, (RowRange(0, 7, 9),))]
ROWS = [0, 1, 2, 3, 5, 6, 7, 8]


def row(number: int) -> FinishedRow:
    return FinishedRow(0, number)


def test_a_shard_is_whole_when_its_last_row_is_finished() -> None:
    assembly = Assembly(SHARDS, INDEX, {})
    for number in ROWS:
        assembly.expect((0, number))
    order = random.Random(0).sample(ROWS, len(ROWS))
    whole = [done for number in order if (done := assembly.finish(row(number))) is not None]
    assert sorted(each.shard.number for each in whole) == [0, 1, 2]
    assert [each.row for done in sorted(whole) for each in done.rows] == ROWS
    assert assembly.is_done


def test_shards_open_one_by_one() -> None:
    assembly = Assembly(SHARDS, INDEX, {})
    assert assembly.opens_a_shard((0, 0))
    assembly.expect((0, 0))
    assert assembly.num_open == 1
    assert not assembly.opens_a_shard((0, 2))
    assert assembly.opens_a_shard((0, 3))


def test_rows_of_earlier_runs_are_not_waited_for() -> None:
    known = {(0, 0): row(0), (0, 2): row(2)}
    assembly = Assembly(SHARDS[:1], INDEX, known)
    assembly.expect((0, 1))
    whole = assembly.finish(row(1))
    assert whole is not None
    assert [each.row for each in whole.rows] == [0, 1, 2]


def test_a_row_that_is_finished_twice_is_a_bug() -> None:
    assembly = Assembly(SHARDS, INDEX, {})
    assembly.expect((0, 0))
    assembly.finish(row(0))
    with pytest.raises(KeyError):
        assembly.finish(row(0))


def test_only_unfinished_rows_are_generated() -> None:
    known = {(0, number): row(number) for number in (0, 1, 2, 3, 6)}
    whole, rest, missing = known_shards(SHARDS, INDEX, known)
    assert [each.shard.number for each in whole] == [0]
    assert rest == SHARDS[1:]
    assert missing == [RowRange(0, 5, 6), RowRange(0, 7, 9)]
