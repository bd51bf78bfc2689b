"""Shard files: whole, synced, checked, and telling what they hold."""

from __future__ import annotations

import hashlib
from pathlib import Path

import duckdb
import pandas as pd
import polars as pl
import pyarrow.parquet as pq
import pytest

from batchgen.data.file_backend import OsBackend, WritableFile
from batchgen.data.files import OutputFiles
from batchgen.data.schema import output_schema
from batchgen.data.table import output_tables
from batchgen.data.writer import ParquetShardWriter, read_footer
from batchgen.errors import OutputUnavailable
from tests.data.shards import LAYOUT, read_rows, row, sample, source, summary, write

ROWS = [row(number, sample(f"text {number}")) for number in range(5)]


def test_a_shard_reads_back_in_input_order(tmp_path: Path) -> None:
    written = write(tmp_path / "shard", ROWS)
    rows = read_rows([written.path])
    assert [each["completions"] for each in rows] == [[f"text {number}"] for number in range(5)]
    content = written.path.read_bytes()
    assert (written.num_bytes, written.sha256) == (len(content), hashlib.sha256(content).hexdigest())


def test_the_footer_tells_what_the_file_holds(tmp_path: Path) -> None:
    written = write(tmp_path / "shard", ROWS)
    footer = read_footer(OutputFiles(), written.path)
    assert footer is not None
    assert (footer.summary, footer.num_bytes) == (summary(ROWS), written.num_bytes)
    assert footer.schema == output_schema(LAYOUT)


@pytest.mark.case(43)
def test_row_groups_follow_the_limit(tmp_path: Path) -> None:
    written = write(tmp_path / "shard", [row(n, sample("x" * 1000)) for n in range(8)], row_group_bytes=2500)
    metadata = pq.ParquetFile(written.path).metadata
    assert [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)] == [2, 2, 2, 2]
    assert metadata.row_group(0).column(0).compression == "ZSTD"


@pytest.mark.case(42)
def test_a_shard_without_rows_has_the_full_schema(tmp_path: Path) -> None:
    written = write(tmp_path / "shard", [])
    assert pq.read_schema(written.path).names == output_schema(LAYOUT).names


def test_pandas_polars_and_duckdb_read_it_without_options(tmp_path: Path) -> None:
    path = write(tmp_path / "shard.parquet", ROWS).path
    assert list(pd.read_parquet(path)["id"]) == [0, 1, 2, 3, 4]
    assert pl.read_parquet(path)["id"].to_list() == [0, 1, 2, 3, 4]
    assert duckdb.sql(f"select batchgen.status, id from '{path}' where id = 3").fetchall() == [("ok", 3)]


def test_a_taken_name_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "shard").write_text("mine")
    with pytest.raises(FileExistsError):
        write(tmp_path / "shard", ROWS)
    assert (tmp_path / "shard").read_text() == "mine"


@pytest.mark.parametrize("content", [b"", b"PAR1", b"not parquet at all"])
def test_what_is_no_shard_has_no_footer(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    assert read_footer(OutputFiles(), tmp_path / "file") is None


def test_parquet_of_others_has_no_footer(tmp_path: Path) -> None:
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "file")
    assert read_footer(OutputFiles(), tmp_path / "file") is None


class _CutFile:
    """Drops the last byte that it is given, as a broken disk might."""

    def __init__(self, file: WritableFile) -> None:
        self.file = file

    def write(self, data: bytes) -> None:
        self.file.write(data[:-1])

    def sync(self) -> None:
        self.file.sync()

    def close(self) -> None:
        self.file.close()


class _CuttingBackend(OsBackend):
    def create(self, path: Path) -> WritableFile:
        return _CutFile(super().create(path))


def test_a_file_that_reads_back_differently_is_not_handed_on(tmp_path: Path) -> None:
    schema = output_schema(LAYOUT)
    writer = ParquetShardWriter(OutputFiles(_CuttingBackend()), schema)
    with pytest.raises(OutputUnavailable, match="reads back other than it was written"):
        writer.write(tmp_path / "shard", summary(ROWS), output_tables([source(ROWS)], ROWS, LAYOUT, schema, 10**8))
    assert list(tmp_path.iterdir()) == []
