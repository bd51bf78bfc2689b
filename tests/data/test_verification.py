"""What a shard file is found to be: every page is read, every key is compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from batchgen.data.files import OutputFiles
from batchgen.data.rows import FinishedRow
from batchgen.data.schema import output_schema
from batchgen.data.table import output_tables
from batchgen.data.verification import FoundShard, inspect_shard
from batchgen.data.writer import ParquetShardWriter, ShardSummary
from batchgen.records import RowError, RowRange
from tests.data.shards import LAYOUT, row, sample, source, summary

FILES = OutputFiles()
SCHEMA = output_schema(LAYOUT)
ROWS = [row(0, sample("a")), row(1, error=RowError("bad_json", "no")), row(2, sample("c"))]


def write(path: Path, rows: list[FinishedRow], facts: ShardSummary) -> None:
    writer = ParquetShardWriter(FILES, SCHEMA)
    writer.write(path, facts, output_tables([source(rows)], rows, LAYOUT, SCHEMA, 10**8))


def inspect(path: Path) -> FoundShard:
    return inspect_shard(FILES, path, SCHEMA, "batchgen", lambda rows: range(rows.start, rows.stop))


def test_a_whole_file_is_found_with_its_facts(tmp_path: Path) -> None:
    write(tmp_path / "shard", ROWS, summary(ROWS))
    found = inspect(tmp_path / "shard")
    assert found.problem is None
    assert found.shard is not None
    assert (found.shard.summary, found.shard.num_bytes) == (summary(ROWS), (tmp_path / "shard").stat().st_size)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"ranges": (RowRange(0, 0, 4),)}, "has 3 rows, but should have"),
        ({"ranges": (RowRange(1, 0, 3),)}, "has row 0 of source 0 where another row belongs"),
        ({"rows": 2}, "has 3 rows, but should have 2"),
        ({"errors": {"bad_json": 2}}, "has other errors"),
    ],
)
def test_a_file_whose_rows_are_not_those_it_counts_is_refused(
    tmp_path: Path, changes: dict[str, object], problem: str
) -> None:
    write(tmp_path / "shard", ROWS, replace(summary(ROWS), **changes))  # type: ignore[arg-type]
    assert problem in str(inspect(tmp_path / "shard").problem)


def test_a_row_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    rows = [ROWS[0], ROWS[0], ROWS[2]]
    write(tmp_path / "shard", rows, replace(summary(ROWS), errors={}))
    assert inspect(tmp_path / "shard").problem is not None


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    write(tmp_path / "shard", ROWS, summary(ROWS))
    whole = inspect(tmp_path / "shard").shard
    content = (tmp_path / "shard").read_bytes()
    for position in range(0, len(content), 61):
        changed = bytearray(content)
        changed[position] ^= 4
        (tmp_path / "changed").write_bytes(bytes(changed))
        assert inspect(tmp_path / "changed").shard != whole


def test_what_is_no_file_is_told_apart(tmp_path: Path) -> None:
    write(tmp_path / "shard", ROWS, summary(ROWS))
    (tmp_path / "link").symlink_to(tmp_path / "shard")
    (tmp_path / "text").write_text("text")
    problems = [inspect(tmp_path / name).problem for name in ("none", "link", "text")]
    assert problems == ["is missing", "is no regular file", "is no whole shard file"]


def test_another_schema_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "shard", ROWS, summary(ROWS))
    other = output_schema(LAYOUT._replace(samples="explode"))
    found = inspect_shard(FILES, tmp_path / "shard", other, "batchgen", lambda rows: range(rows.start, rows.stop))
    assert found.problem == "has another schema than this output"
