"""A JSON Schema in the job becomes typed columns in Parquet: whole jobs with a small model, from inputs to columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.config import JobConfig, load_job
from batchgen.data.files import OutputFiles
from batchgen.data.typed_columns import ENUM
from batchgen.errors import JobError
from batchgen.pipeline.grammar_check import GrammarLimits, check_grammar
from batchgen.pipeline.redo import repair, rerun
from batchgen.pipeline.report import JobReport
from batchgen.pipeline.runner import run_job
from batchgen.pipeline.stored import read_output
from batchgen.pipeline.verify import verify
from batchgen.response_format import ResponseFormat
from tests.engine.models import save_model

NUM_ROWS = 6
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["animal", "plant"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "place": {"type": "object", "properties": {"x": {"type": "number", "maximum": 9}}, "required": ["x"]},
        "note": {"type": ["string", "null"], "maxLength": 3},
    },
    "required": ["name", "kind", "sizes", "place"],
}  # fmt: skip
TYPES = {
    "name": pa.string(),
    "kind": ENUM,
    "sizes": pa.list_(pa.int64()),
    "place": pa.struct([("x", pa.float64())]),
    "note": pa.string(),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    save_model(home / "model", "plain")
    (home / "in.jsonl").write_text("".join(f'{{"topic": "topic {row}"}}\n' for row in range(NUM_ROWS)))
    (home / "thing.schema.json").write_text(json.dumps(SCHEMA))
    return home


def job_of(home: Path, name: str, schema: Any = "thing.schema.json", **settings: Any) -> JobConfig:
    contents = {
        "version": 1,
        "model": {"path": "model"},
        "input": {"path": "in.jsonl"},
        "prompt": {"template": "Write about {{ topic }}."},
        "sampling": {
            "seed": 3,
            "max_tokens": 300,
            "response_format": {"type": "json_schema", "schema": schema},
            **settings.pop("sampling", {}),
        },
        "engine": {"kv_cache_memory": "4MiB", "threads": 1},
        "output": {"path": name, "shard_rows": 2, **settings.pop("output", {})},
        **settings,
    }
    path = home / f"{name}.yaml"
    path.write_text(json.dumps(contents))
    return load_job(path)


def run(job: JobConfig) -> tuple[JobReport, pa.Table]:
    report = run_job(job)
    schemas = [pq.read_schema(shard) for shard in report.data_files]
    assert all(schema.equals(schemas[0]) for schema in schemas), "shards differ in their schema"
    return report, pq.read_table(job.output_dir / "data")


def test_fields_are_typed_columns_beside_the_text(home: Path) -> None:
    report, table = run(job_of(home, "columns", output={"samples": "explode"}, sampling={"n": 2}))
    assert report.num_ok == NUM_ROWS
    assert {name: table.schema.field(name).type for name in TYPES} == TYPES
    for row in table.to_pylist():
        value = json.loads(row["completion"])
        jsonschema.validate(value, SCHEMA)
        assert {name: row[name] for name in TYPES} == {"note": None, **value}


def test_samples_in_lists_have_lists_of_values(home: Path) -> None:
    _, table = run(job_of(home, "lists", sampling={"n": 3}))
    assert {name: table.schema.field(name).type for name in TYPES} == {n: pa.list_(t) for n, t in TYPES.items()}
    for row in table.to_pylist():
        values = [{"note": None, **json.loads(text)} for text in row["completions"]]
        assert {name: row[name] for name in TYPES} == {name: [value[name] for value in values] for name in TYPES}


@pytest.mark.slow
def test_rows_made_anew_and_files_made_anew_are_the_same(home: Path) -> None:
    job = job_of(home, "lists-2", sampling={"n": 2})
    _, table = run(job)
    assert rerun(job, "batchgen.row in [1, 4]").num_rows_this_run == 2
    assert pq.read_table(job.output_dir / "data").to_pylist() == table.to_pylist()
    (job.output_dir / "data" / "part-00001.parquet").write_bytes(b"damaged")
    assert len(verify(read_output(OutputFiles(), job.output_dir)).problems) == 1
    repair(job)
    assert pq.read_table(job.output_dir / "data").to_pylist() == table.to_pylist()
    assert verify(read_output(OutputFiles(), job.output_dir)).problems == []


def test_a_cut_row_is_an_error_with_its_text_and_the_schema_stays(home: Path) -> None:
    report, table = run(job_of(home, "cut", sampling={"max_tokens": 12}))
    assert report.errors_by_code == {"incomplete_json": NUM_ROWS}
    assert table.schema.field("name").type == pa.list_(pa.string())
    for row in table.to_pylist():
        assert row["completions"][0].startswith('{"name": "')
        assert row["name"] == [None]
        assert row["batchgen"]["status"] == "error"


def test_the_order_of_properties_is_part_of_the_jobs_identity(home: Path) -> None:
    first = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}, "required": ["a", "b"]}
    other = {**first, "properties": dict(reversed(first["properties"].items()))}
    job = job_of(home, "order", first)
    assert job.identity() != job_of(home, "order", other).identity()
    _, table = run(job)
    assert table["completions"].to_pylist() == [['{"b": null, "a": null}']] * NUM_ROWS
    stored = json.loads((job.output_dir / "_batchgen" / "job.yaml").read_text())
    assert JobConfig.model_validate(stored).sampling.response_format == job.sampling.response_format


def test_a_schema_that_nothing_matches_ends_the_job_before_the_model_is_loaded(home: Path) -> None:
    job = job_of(home, "impossible", {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}})
    with pytest.raises(JobError, match=r"sampling\.response_format\.schema: /properties/a: regex parse error"):
        run_job(job)
    assert not (job.output_dir / "_batchgen" / "plan.json").exists()


def test_rows_select_their_format_and_a_name_that_is_none_is_a_row_error(home: Path) -> None:
    kinds = ["thing", "word", "thing", "nothing", "word"]
    (home / "kinds.jsonl").write_text("".join(f'{{"topic": "a", "form": "{kind}"}}\n' for kind in kinds))
    job_of(home, "select", input={"path": "kinds.jsonl"}, output={"samples": "explode"})
    word = {"type": "object", "properties": {"name": {"enum": ["dog", "cat"]}}, "required": ["name"]}
    contents = json.loads((home / "select.yaml").read_text())
    contents["sampling"]["response_format"] = {
        "type": "select",
        "by": "{{ form }}",
        "of": {
            "thing": {"type": "json_schema", "schema": "thing.schema.json"},
            "word": {"type": "json_schema", "schema": word},
        },
    }
    (home / "select.yaml").write_text(json.dumps(contents))
    report, table = run(load_job(home / "select.yaml"))
    assert report.errors_by_code == {"unknown_format": 1}
    assert table.schema.field("sizes").type == TYPES["sizes"]
    assert table.schema.field("name").type == pa.string()
    for row, kind in zip(table.to_pylist(), kinds, strict=True):
        if kind == "nothing":
            assert row["completion"] is None
            assert "gives 'nothing'; " in row["batchgen"]["error_message"]
            continue
        value = json.loads(row["completion"])
        jsonschema.validate(value, SCHEMA if kind == "thing" else word)
        assert row["sizes"] == value.get("sizes")
    contents["sampling"]["response_format"]["by"] = "{{ farm }}"
    contents["output"]["path"] = "select-2"
    (home / "select.yaml").write_text(json.dumps(contents))
    with pytest.raises(JobError, match=r"sampling\.response_format\.by: no column 'farm' in the input"):
        run_job(load_job(home / "select.yaml"))


RUNS = [f"/([ab]*a[ab]{{{count}}})*/" for count in range(3, 14)]
"""Each is small; the automaton of all together is not."""
EXPONENTIAL = {
    "grammar": ResponseFormat(type="grammar", grammar="start: A\nA: " + " & ".join(RUNS)),
    "patterns": ResponseFormat(
        type="json_schema",
        schema={"allOf": [{"type": "string", "pattern": f"a.{{{count}}}b"} for count in range(5, 25)]},
    ),
}


@pytest.mark.parametrize("form", EXPONENTIAL.values(), ids=EXPONENTIAL.keys())
def test_what_is_exponential_ends_at_its_caps(home: Path, form: ResponseFormat) -> None:
    with pytest.raises(JobError, match=r"takes more than 1 s of processor time|takes more than 512 MiB of memory"):
        check_grammar(form, home / "model", GrammarLimits(seconds=1.0, memory_bytes=2**29))


@pytest.mark.parametrize("regex", ["(a|aa)*b", "(a|b)*a(a|b){400}", "(((a{1,100}){1,100}){1,100}){1,100}b"])
def test_what_is_exponential_elsewhere_is_not_here(home: Path, regex: str) -> None:
    check_grammar(ResponseFormat(type="regex", regex=regex), home / "model", GrammarLimits(seconds=1.0))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (GrammarLimits(seconds=0.02), "takes more than 0.02 s of processor time"),
        (GrammarLimits(memory_bytes=2**20), "takes more than 1 MiB of memory"),
    ],
)
def test_a_grammar_that_takes_too_long_or_too_much_is_a_job_error(
    home: Path, limits: GrammarLimits, message: str
) -> None:
    many = ResponseFormat(type="choice", choice=tuple(f"{number * 7919 % 100_000:05d}" for number in range(60_000)))
    with pytest.raises(JobError, match=message):
        check_grammar(many, home / "model", limits)
