"""What others make of a finished output: pandas, polars, DuckDB and `datasets` read it without options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pytest
from datasets import Dataset, load_dataset

from batchgen.pipeline.runner import run_job
from tests.pipeline.fakes import FakeWorld, make_job


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards: one without an error, one of errors alone, whose completions are null, and one of both."""
    root = tmp_path_factory.mktemp("output")
    job = make_job(root, 0)
    prompts = ["a", "b", "c", "d", "e!", "f!", "g!", "h!", "i", "j!"]
    rows = [{"id": row, "prompt": prompt, "note": None if row < 8 else "x"} for row, prompt in enumerate(prompts)]
    (root / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_job(job, services=FakeWorld().services)
    return job.output_dir


STATUS = ["ok"] * 4 + ["error"] * 4 + ["ok", "error"]


def test_pandas_reads_it(output: Path) -> None:
    frame = pd.read_parquet(output / "data")
    assert list(frame["id"]) == list(range(10))
    assert [each["status"] for each in frame["batchgen"]] == STATUS


def test_polars_reads_it(output: Path) -> None:
    frame = pl.read_parquet(output / "data" / "*.parquet")
    assert frame["id"].to_list() == list(range(10))
    assert frame["batchgen"].struct.field("status").to_list() == STATUS
    assert frame["completions"].dtype == pl.List(pl.String)


def test_duckdb_reads_it(output: Path) -> None:
    rows = duckdb.sql(f"select id, batchgen.status, len(completions) from '{output}/data/*.parquet' order by id")
    assert rows.fetchall() == [(row, status, 2 if status == "ok" else None) for row, status in enumerate(STATUS)]


@pytest.mark.parametrize(
    "options", [{"path": "parquet", "data_dir": "out/data"}, {"path": "out"}], ids=["data", "card"]
)
def test_datasets_reads_it(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """By the directory of the files, and by the output's own card."""
    monkeypatch.chdir(output.parent)
    loaded = load_dataset(**options, split="train", cache_dir=str(tmp_path))
    assert isinstance(loaded, Dataset)
    assert loaded["id"][:] == list(range(10))
    assert [each["status"] for each in loaded["batchgen"]] == STATUS
    assert loaded["completions"][4] is None
    assert loaded["note"][:] == [None] * 8 + ["x", "x"]
