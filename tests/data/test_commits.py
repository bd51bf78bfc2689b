"""The manifest: what its records add up to, and what is wrong with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from batchgen.data.commits import (
    CommitLog,
    Record,
    ShardFile,
    read_log,
    record_path,
    replay,
    shard_name,
    shard_number,
)
from batchgen.data.files import OutputFiles
from batchgen.data.writer import ShardSummary
from batchgen.errors import OutputDamaged, OutputLocked
from batchgen.records import RowRange

FILES = OutputFiles()


def shard(number: int, start: int = 0, stop: int = 1, attempt: str = "a") -> ShardFile:
    summary = ShardSummary(number, (RowRange(0, start, stop),), "f", attempt, stop - start, stop - start, {}, 1, 1)
    return ShardFile(summary, 100, f"hash of {number} by {attempt}")


def write_records(tmp_path: Path, count: int) -> CommitLog:
    log = CommitLog(FILES, tmp_path, "f", 0, clock=lambda: 5.0)
    for number in range(count):
        log.append("shard", shard(number, number, number + 1))
    return log


def test_records_come_back_in_order(tmp_path: Path) -> None:
    write_records(tmp_path, 3)
    found = read_log(FILES, tmp_path)
    assert [record.number for record in found.records] == [0, 1, 2]
    assert found.records[1] == Record(1, "shard", "f", shard(1, 1, 2), None, 5.0)
    assert (found.damaged, found.torn, found.next_number) == ({}, None, 3)


def test_a_number_that_is_taken_stops_the_second_writer(tmp_path: Path) -> None:
    first, second = CommitLog(FILES, tmp_path, "f", 0), CommitLog(FILES, tmp_path, "f", 0)
    first.append("shard", shard(0))
    before = record_path(tmp_path, 0).read_bytes()
    with pytest.raises(OutputLocked, match="another run has written this record"):
        second.append("shard", shard(1))
    assert record_path(tmp_path, 0).read_bytes() == before


@pytest.mark.parametrize("keep", [0, 1, 50])
def test_a_torn_newest_record_is_told_from_damage(tmp_path: Path, keep: int) -> None:
    write_records(tmp_path, 3)
    path = record_path(tmp_path, 2)
    path.write_bytes(path.read_bytes()[:keep])
    found = read_log(FILES, tmp_path)
    assert (len(found.records), found.damaged, found.torn) == (2, {}, path)


def test_an_older_record_that_is_not_intact_is_damage(tmp_path: Path) -> None:
    write_records(tmp_path, 3)
    path = record_path(tmp_path, 1)
    path.write_bytes(path.read_bytes().replace(b'"bytes":100', b'"bytes":101'))
    assert read_log(FILES, tmp_path).damaged == {1: f"{path}: is not intact"}


def test_a_gap_is_damage(tmp_path: Path) -> None:
    write_records(tmp_path, 3)
    record_path(tmp_path, 1).unlink()
    assert read_log(FILES, tmp_path).damaged == {1: f"{record_path(tmp_path, 1)}: is missing"}


def test_a_record_under_the_number_of_another_is_not_intact(tmp_path: Path) -> None:
    write_records(tmp_path, 3)
    record_path(tmp_path, 1).write_bytes(record_path(tmp_path, 0).read_bytes())
    assert len(read_log(FILES, tmp_path).damaged) == 1


def test_a_symbolic_link_is_no_record(tmp_path: Path) -> None:
    write_records(tmp_path, 2)
    record_path(tmp_path, 0).rename(tmp_path / "elsewhere")
    record_path(tmp_path, 0).symlink_to(tmp_path / "elsewhere")
    assert len(read_log(FILES, tmp_path).damaged) == 1


def test_shard_names_are_read_only_as_they_are_written() -> None:
    assert (shard_name(7), shard_number("part-00007.parquet")) == ("part-00007.parquet", 7)
    assert shard_number(shard_name(123_456)) == 123_456
    others = ["part-7.parquet", "part-000007.parquet", "part-00007.parquet.crc", "x", "part-00007.PARQUET"]
    assert [shard_number(name) for name in others] == [None] * 5


def records(*entries: tuple[str, ShardFile | None]) -> list[Record]:
    return [Record(number, kind, "f", each, None, 0.0) for number, (kind, each) in enumerate(entries)]  # type: ignore[arg-type]


def test_a_replacement_takes_the_place_of_the_first_file() -> None:
    new = shard(0, attempt="b")
    state = replay(records(("shard", shard(0)), ("intent", new), ("replaced", new)), "f")
    assert (state.shards, state.pending) == ({0: new}, None)


def test_an_intent_that_nothing_followed_is_pending() -> None:
    log = records(("shard", shard(0)), ("intent", shard(0, attempt="b")))
    state = replay(log, "f")
    assert (state.shards, state.pending) == ({0: shard(0)}, log[1])


def test_an_intent_that_was_given_up_changes_nothing() -> None:
    log = records(("shard", shard(0)), ("intent", shard(0, attempt="b")), ("shard", shard(1, 1, 2)))
    state = replay(log, "f")
    assert (state.shards, state.pending) == ({0: shard(0), 1: shard(1, 1, 2)}, None)


def test_a_void_record_only_takes_up_its_number() -> None:
    assert replay(records(("void", None), ("shard", shard(0))), "f").shards == {0: shard(0)}


def test_records_that_contradict_each_other_are_damage() -> None:
    with pytest.raises(OutputDamaged, match="a second time"):
        replay(records(("shard", shard(0)), ("shard", shard(0))), "f")
    overlapping = records(("shard", shard(0, 0, 5)), ("shard", shard(1, 4, 8)))
    with pytest.raises(OutputDamaged, match="both hold row 4 of source 0"):
        replay(overlapping, "f")


def test_a_record_of_another_job_is_damage() -> None:
    with pytest.raises(OutputDamaged, match="belongs to another job"):
        replay(records(("shard", shard(0))), "other")


def test_a_record_of_a_later_version_is_refused() -> None:
    with pytest.raises(OutputDamaged, match="a later batchgen"):
        replay(records(("merged", shard(0))), "f")


def test_a_shard_file_survives_json() -> None:
    one = shard(3, 5, 9)
    one = replace(one, summary=replace(one.summary, errors={"bad_json": 2}))
    assert ShardFile.from_json(one.to_json()) == one
