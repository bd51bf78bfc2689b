"""Parquet: exact types, exact names, flat memory, and damage that is named."""

from __future__ import annotations

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchgen.config import InputConfig
from batchgen.data.inputs import list_inputs
from batchgen.data.reader import PromptReader, scan_inputs
from batchgen.errors import InputError
from batchgen.records import RowRange
from tests.data.reading import read_all, write_jsonl


@pytest.mark.case(7)
def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    pq.write_table(table, tmp_path / "in.parquet")
    with pytest.raises(InputError, match=r"in\.parquet: has more than one column named 'prompt'"):
        read_all(tmp_path, "in.parquet")


@pytest.mark.case(7)
def test_a_name_with_a_dot_is_the_column_and_not_the_field_of_a_struct(tmp_path: Path) -> None:
    table = pa.table({"a": [{"b": 1, "c": 2}], "a.b": ["text"], "a b": [3]})
    pq.write_table(table, tmp_path / "in.parquet")
    assert read_all(tmp_path, "in.parquet").values == [{"a": {"b": 1, "c": 2}, "a.b": "text", "a b": 3}]
    reading = read_all(tmp_path, "in.parquet", columns=["a.b"])
    assert reading.table.to_pydict() == {"a.b": ["text"]}


@pytest.mark.case(10)
def test_no_rows_give_a_table_with_the_whole_schema(tmp_path: Path) -> None:
    schema = pa.schema([("prompt", pa.string()), ("n", pa.int8())])
    pq.write_table(schema.empty_table(), tmp_path / "in.parquet")
    reading = read_all(tmp_path, "in.parquet")
    assert reading.rows == []
    assert reading.scan.schema == reading.table.schema == schema


@pytest.mark.parametrize("cut", [0, 3, 200, -1])
def test_a_cut_file_is_refused_by_name(tmp_path: Path, cut: int) -> None:
    pq.write_table(pa.table({"p": ["text"] * 100}), tmp_path / "in.parquet")
    (tmp_path / "in.parquet").write_bytes((tmp_path / "in.parquet").read_bytes()[:cut])
    with pytest.raises(InputError, match=r"in\.parquet"):
        read_all(tmp_path, "in.parquet")


def test_a_damaged_page_is_an_input_error_that_names_the_row(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    table = pa.table({"p": [str(number) for number in range(2000)]})
    pq.write_table(table, path, compression="none", write_page_checksum=True, use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[500] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"in\.parquet: row 0: is no Parquet file, or a cut or damaged one"):
        read_all(tmp_path, "in.parquet")


def test_text_that_is_not_utf_8_is_a_row_error(tmp_path: Path) -> None:
    bad = pa.array([b"good", b"\xff", b"fine"], pa.binary()).view(pa.string())
    nested = pa.StructArray.from_arrays([pa.array([b"a", b"b", b"\xfe"], pa.binary()).view(pa.string())], ["x"])
    pq.write_table(pa.table({"p": bad, "s": nested}), tmp_path / "in.parquet")
    reading = read_all(tmp_path, "in.parquet")
    assert reading.errors == {1: "invalid_utf8", 2: "invalid_utf8"}
    assert reading.values == [{"p": "good", "s": {"x": "a"}}]
    assert reading.table.to_pydict() == {"p": ["good", None, None], "s": [{"x": "a"}, None, None]}


def test_values_are_plain_python_and_carried_columns_keep_their_exact_types(tmp_path: Path) -> None:
    at = datetime.datetime(2026, 1, 2, 3, 4, 5, 6)
    table = pa.table(
        {
            "ns": pa.array([at], pa.timestamp("ns", tz="UTC")),
            "words": pa.array(["x"]).dictionary_encode(),
            "large": pa.array(["y"], pa.large_string()),
            "decimal": pa.array([Decimal("1.50")], pa.decimal128(5, 2)),
            "map": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int8())),
            "vector": pa.array([[1.0, 2.0]], pa.list_(pa.float32(), 2)),
            "half": pa.array([1.5], pa.float16()),
            "void": pa.nulls(1),
        }
    )
    pq.write_table(table, tmp_path / "in.parquet")
    reading = read_all(tmp_path, "in.parquet")
    (values,) = reading.values
    assert values["ns"].replace(tzinfo=None) == at
    assert values["words"] == "x"
    assert values["map"] == {"k": 1}
    assert values["decimal"] == Decimal("1.50")
    for field in table.schema:
        expected = pa.string() if field.name == "void" else field.type
        assert reading.table.schema.field(field.name).type == expected
    assert reading.table.drop_columns("void").equals(table.drop_columns("void"))


def test_files_of_different_types_are_read_into_one_that_holds_both(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": pa.array([1], pa.int8()), "t": ["a"], "only": [True]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"n": [2.5], "t": [{"x": 1}]}), tmp_path / "2.parquet")
    write_jsonl(tmp_path / "3.jsonl", [{"n": 3, "t": None}])
    reading = read_all(tmp_path, ["1.parquet", "2.parquet", "3.jsonl"])
    assert reading.table.to_pydict() == {
        "n": [1.0, 2.5, 3.0],
        "t": ['"a"', '{"x": 1}', None],
        "only": [True, None, None],
    }
    assert [row.values["t"] for row in reading.rows] == ["a", {"x": 1}, None]


def test_any_range_is_read_whatever_the_row_groups(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": list(range(5000)), "t": ["x"] * 5000}), tmp_path / "in.parquet", row_group_size=700)
    config = InputConfig(path="in.parquet")
    scan = scan_inputs(list_inputs(config, tmp_path), config)
    reader = PromptReader(scan, config, columns={"n"})
    for start, stop in [(0, 3), (3, 1500), (1600, 1601), (4999, 9999), (699, 701), (5000, 5001)]:
        rows = list(reader.read(RowRange(0, start, stop)))
        assert [row.row for row in rows] == [row.values["n"] for row in rows] == list(range(start, min(stop, 5000)))
        tables = list(reader.read_columns(RowRange(0, start, stop)))
        assert sum(table.num_rows for table in tables) == len(rows)
    reader.close()


def test_rows_are_counted_when_no_column_is_needed(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": list(range(10))}), tmp_path / "in.parquet")
    config = InputConfig(path="in.parquet", columns=[])
    scan = scan_inputs(list_inputs(config, tmp_path), config)
    reader = PromptReader(scan, config, columns=set())
    assert [(row.row, row.values) for row in reader.read(RowRange(0, 4, 6))] == [(4, {}), (5, {})]
    assert [table.num_rows for table in reader.read_columns(RowRange(0, 4, 6))] == [2]
    reader.close()


TYPES = st.sampled_from(
    [
        (pa.string(), st.text(max_size=8)),
        (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
        (pa.float64(), st.floats(allow_nan=False)),
        (pa.bool_(), st.booleans()),
        (pa.binary(), st.binary(max_size=8)),
        (pa.date32(), st.dates()),
        (pa.timestamp("us"), st.datetimes()),
        (pa.list_(pa.string()), st.lists(st.text(max_size=3) | st.none(), max_size=3)),
        (
            pa.struct([("x", pa.int8()), ("y", pa.string())]),
            st.fixed_dictionaries({"x": st.integers(-9, 9), "y": st.text(max_size=3)}),
        ),
    ]
)


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    num_rows = draw(st.integers(0, 12))
    columns: dict[str, pa.Array[Any]] = {}
    for name in draw(st.lists(st.sampled_from(["a", "b", "a.b", "c d", "é"]), min_size=1, max_size=4, unique=True)):
        kind, values = draw(TYPES)
        columns[name] = pa.array(draw(st.lists(values | st.none(), min_size=num_rows, max_size=num_rows)), kind)
    return pa.table(columns)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(table=tables(), row_group_size=st.integers(1, 5))
def test_any_table_comes_back_with_its_rows_types_and_values(
    tmp_path: Path, table: pa.Table, row_group_size: int
) -> None:
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=row_group_size)
    reading = read_all(tmp_path, "in.parquet")
    assert reading.values == table.to_pylist()
    assert reading.table.schema == table.schema
    assert reading.table.to_pylist() == table.to_pylist()
