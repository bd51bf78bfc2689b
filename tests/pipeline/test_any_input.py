"""Whatever the format: the rows, values and types of a table are those of the job's output."""

from __future__ import annotations

import csv
import datetime
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.data.reader import DecodingHere, PromptReader
from batchgen.pipeline import session
from batchgen.pipeline.runner import run_job
from tests.pipeline.fakes import FakeWorld, make_job

TEXT = st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\x00"), max_size=8)
PROMPT = TEXT.map(lambda text: text.replace("!", "").replace("\r", "") + "p")
TYPED: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.string(), TEXT),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.float64(), st.floats(allow_nan=False, allow_infinity=False)),
    (pa.bool_(), st.booleans()),
    (pa.list_(pa.int64()), st.lists(st.integers(-9, 9), max_size=3)),
    (pa.struct([("x", pa.int64()), ("y", pa.string())]), st.fixed_dictionaries({"x": st.just(1), "y": TEXT})),
]
COLUMNAR = [
    (pa.binary(), st.binary(max_size=5)),
    (pa.timestamp("us"), st.datetimes(datetime.datetime(1970, 1, 1), datetime.datetime(2100, 1, 1))),
    (pa.int8(), st.integers(-128, 127)),
]


@st.composite
def tables(draw: st.DrawFn, types: list[tuple[pa.DataType, st.SearchStrategy[Any]]], nulls: bool = True) -> pa.Table:
    """A table of at least one row with the column `prompt`, and columns that each hold a value somewhere."""
    num_rows = draw(st.integers(1, 9))
    columns: dict[str, Any] = {"prompt": pa.array([draw(PROMPT) for _ in range(num_rows)])}
    for name in draw(st.lists(st.sampled_from(["a", "b.c", "d e", "é"]), max_size=3, unique=True)):
        kind, values = draw(st.sampled_from(types))
        rest = st.lists(values | st.none() if nulls else values, min_size=num_rows - 1, max_size=num_rows - 1)
        columns[name] = pa.array([draw(values), *draw(rest)], kind)
    return pa.table(columns)


@pytest.fixture(scope="module", autouse=True)
def in_this_process() -> Iterator[None]:
    """Without a child for each example; what children change is the matter of test_bounded_reader.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "BoundedReader", PromptReader)
        patch.setattr(session, "DecodingInChildren", DecodingHere)
        yield


def answered(name: str, write: Callable[[Path], None]) -> pa.Table:
    """The source columns of the output of a job over one file."""
    with tempfile.TemporaryDirectory() as base:
        job = make_job(Path(base), input={"path": name})
        write(Path(base, name))
        run_job(job, services=FakeWorld().services)
        parts = sorted(Path(base, "out/data").glob("*.parquet"))
        table = pa.concat_tables([pq.read_table(part) for part in parts])
    rows = table["batchgen"].to_pylist()
    assert [row["row"] for row in rows] == sorted(row["row"] for row in rows)
    assert {row["status"] for row in rows} == {"ok"}
    return table.drop_columns(["completions", "batchgen"]).replace_schema_metadata()


def write_ipc(path: Path, table: pa.Table, *, stream: bool) -> None:
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)


@settings(max_examples=10, deadline=None)
@given(table=tables([*TYPED, *COLUMNAR]))
def test_of_parquet(table: pa.Table) -> None:
    assert answered("in.parquet", lambda path: pq.write_table(table, path, row_group_size=3)).equals(table)


@pytest.mark.parametrize("stream", [False, True])
@settings(max_examples=10, deadline=None)
@given(table=tables([*TYPED, *COLUMNAR]))
def test_of_arrow(table: pa.Table, stream: bool) -> None:
    assert answered("in.arrow", lambda path: write_ipc(path, table, stream=stream)).equals(table)


@settings(max_examples=10, deadline=None)
@given(table=tables(TYPED))
def test_of_json_lines(table: pa.Table) -> None:
    lines = [json.dumps(row, ensure_ascii=False) for row in table.to_pylist()]
    found = answered("in.jsonl", lambda path: _write(path, "\n".join(lines)))
    assert found.column_names == table.column_names
    assert found.to_pylist() == table.to_pylist()
    # A list that held no value at all has no type of its own.
    for name in table.column_names:
        is_empty_list = pa.types.is_list(table[name].type) and not any(filter(None, table[name].to_pylist()))
        assert is_empty_list or found[name].type == table[name].type


@pytest.mark.parametrize(("name", "delimiter"), [("in.csv", ","), ("in.tsv", "\t")])
@settings(max_examples=5, deadline=None)
@given(table=tables([(pa.string(), TEXT.map(lambda text: text.replace("\r", "")))], nulls=False))
def test_of_csv(table: pa.Table, name: str, delimiter: str) -> None:
    def write(path: Path) -> None:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, delimiter=delimiter, lineterminator="\n", quoting=csv.QUOTE_ALL)
            writer.writerow(table.column_names)
            writer.writerows(zip(*table.to_pydict().values(), strict=True))

    assert answered(name, write).equals(table)


def _write(path: Path, text: str) -> None:
    path.write_bytes(text.encode())
