"""The quickstart model on 200 rows of a nested schema; some of them with four samples under preemption, and killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.data.typed_columns import ENUM
from tests.program import start_job

pytestmark = pytest.mark.slow

NUM_ROWS = 200
FEWER_ROWS = 60
"""Of the runs that are compared with the first one."""
JOBS = Path(__file__).parents[2] / "jobs"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 3, "maxLength": 30},
        "level": {"enum": ["easy", "medium", "hard"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 10}, "minItems": 1, "maxItems": 3},
        "score": {"type": "number", "minimum": 0, "maximum": 10},
        "source": {
            "type": "object",
            "properties": {
                "kind": {"enum": ["book", "person", "web"]},
                "year": {"type": "integer", "minimum": 1900, "maximum": 2030},
                "page": {"type": ["integer", "null"], "minimum": 1, "maximum": 999},
            },
            "required": ["kind", "year"],
        },
        "note": {"type": "string", "maxLength": 20},
        "checked": {"type": "boolean"},
    },
    "required": ["title", "level", "tags", "score", "source", "checked"],
}  # fmt: skip
TYPES = {
    "title": pa.string(),
    "level": ENUM,
    "tags": pa.list_(pa.string()),
    "score": pa.float64(),
    "source": pa.struct([("kind", ENUM), ("year", pa.int64()), ("page", pa.int64())]),
    "note": pa.string(),
    "checked": pa.bool_(),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    """The inputs, and the output of an undisturbed run."""
    home = tmp_path_factory.mktemp("home")
    topics = [json.loads(line) for line in (JOBS / "quickstart.jsonl").read_text().splitlines()]
    rows = [{"topic": topics[row % len(topics)]["topic"], "turn": row // len(topics)} for row in range(NUM_ROWS)]
    (home / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(write_job(home, smollm2, "calm")) == 0
    return home


def write_job(
    home: Path, model: Path, output: str, limit: int | None = None, kv_cache_memory: str = "256MiB", **sampling: Any
) -> Path:
    form = {"type": "json_schema", "schema": SCHEMA}
    job = {
        "version": 1,
        "model": {"path": str(model)},
        "input": {"path": "in.jsonl", "limit": limit},
        "prompt": {"messages": [{"role": "user", "content": "Card {{ turn }} about {{ topic }}, as JSON."}]},
        "sampling": {"seed": 7, "max_tokens": 160, "temperature": 0.8, "response_format": form, **sampling},
        "engine": {"kv_cache_memory": kv_cache_memory},
        "output": {"path": output, "shard_rows": 20},
        "run": {"journal_interval": "200ms", "grace": "20s"},
    }
    path = home / f"{output}.yaml"
    path.write_text(json.dumps(job))
    return path


def run(job: Path) -> int:
    return start_job(job).wait(1800)


def table_of(home: Path, output: str) -> pa.Table:
    schemas = [pq.read_schema(shard) for shard in sorted((home / output / "data").glob("*.parquet"))]
    assert all(schema.equals(schemas[0]) for schema in schemas)
    return pq.read_table(home / output / "data")


def check(table: pa.Table) -> float:
    """Every ok text is a value of the schema and stands in its columns; returns the share of ok rows."""
    assert {name: table.schema.field(name).type for name in TYPES} == {n: pa.list_(t) for n, t in TYPES.items()}
    num_ok = 0
    for row in table.to_pylist():
        if row["batchgen"]["status"] == "error":
            assert row["batchgen"]["error_code"] == "incomplete_json"
            continue
        num_ok += 1
        for sample, text in enumerate(row["completions"]):
            value = json.loads(text)
            jsonschema.validate(value, SCHEMA)
            source = {"page": None, **value["source"]}
            assert {name: row[name][sample] for name in TYPES} == {"note": None, **value, "source": source}
    return num_ok / len(table)


def metrics_of(home: Path, output: str) -> dict[str, Any]:
    """Of an output's one run, as its end was noted."""
    (record,) = (home / output / "_batchgen" / "metrics").glob("*.jsonl")
    figures: dict[str, Any] = json.loads(record.read_text().splitlines()[-1])["end"]["engine"]
    return figures


def test_every_ok_row_is_a_value_of_the_schema_in_the_declared_types(home: Path) -> None:
    table = table_of(home, "calm")
    assert len(table) == NUM_ROWS
    assert check(table) > 0.95
    assert metrics_of(home, "calm")["num_forced_tokens"] > 0


def test_four_samples_under_preemption_begin_with_the_calm_run(home: Path, smollm2: Path) -> None:
    """Sample 0 is the same whatever n and the memory are."""
    assert run(write_job(home, smollm2, "tight", FEWER_ROWS, kv_cache_memory="24MiB", n=4)) == 0
    assert metrics_of(home, "tight")["num_preemptions"] > 10
    table, calm = table_of(home, "tight"), table_of(home, "calm")
    assert check(table) > 0.9
    assert len(table) == FEWER_ROWS
    for many, one in zip(table["completions"].to_pylist(), calm["completions"].to_pylist(), strict=False):
        assert many[0] == one[0]


def test_killed_again_and_again_the_rows_are_the_same(home: Path, smollm2: Path) -> None:
    job = write_job(home, smollm2, "killed", FEWER_ROWS)
    num_kills = 0
    journal = home / "killed" / "_batchgen" / "journal"
    for seconds in (0.5, 1.0, 2.0, 4.0):
        process = start_job(job)
        end = time.monotonic() + 300
        sizes = {path: path.stat().st_size for path in journal.glob("*.log")} if journal.exists() else {}
        while process.poll() is None and not any(
            path.stat().st_size > sizes.get(path, 0) for path in journal.glob("*.log")
        ):
            assert time.monotonic() < end
            time.sleep(0.05)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            num_kills += 1
    assert num_kills >= 2
    assert run(job) == 0
    table, calm = table_of(home, "killed"), table_of(home, "calm")
    assert table.schema.equals(calm.schema)
    assert table.to_pylist() == calm.to_pylist()[:FEWER_ROWS]
