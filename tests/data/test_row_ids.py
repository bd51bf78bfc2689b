from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.config import InputConfig
from batchgen.data import row_ids
from batchgen.data.inputs import list_inputs
from batchgen.data.reader import scan_inputs
from batchgen.data.row_ids import RowId, refuse_repeated_ids
from batchgen.errors import InputError
from tests.data.reading import read_all, write_jsonl


def test_the_id_column_is_carried_whatever_columns_are_asked_for(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", [{"name": "a", "x": 1, "y": 2}])
    assert read_all(tmp_path, "in.jsonl", id_column="name", columns=["y"]).table.column_names == ["name", "y"]
    assert read_all(tmp_path, "in.jsonl", id_column="y", columns=["y"]).table.column_names == ["y"]
    assert read_all(tmp_path, "in.jsonl", id_column="y").table.column_names == ["name", "x", "y"]
    with pytest.raises(InputError, match="no column 'nam' in the input; did you mean 'name'"):
        read_all(tmp_path, "in.jsonl", id_column="nam")


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ([{"id": "z"}, {"id": "b"}], r'is "b" in row 1 of \S*1.jsonl and again in row 1 of \S*2.jsonl; make it unique'),
        ([{"id": "\x1b[31m"}, {"id": "\x1b[31m"}], r'is "\\u001b\[31m" in row 0 of \S*2.jsonl and again in row 1'),
        ([{"id": None}], r"is null in row 0 of \S*2.jsonl; give the row an id"),
        ([{"other": 1}], r"is null in row 0 of \S*2.jsonl; give the row an id"),
    ],
)
def test_an_id_that_is_missing_or_there_twice_is_refused_when_asked(
    tmp_path: Path, second: list[Any], reason: str
) -> None:
    write_jsonl(tmp_path / "1.jsonl", [{"id": "a"}, {"id": "b"}])
    write_jsonl(tmp_path / "2.jsonl", second)
    read_all(tmp_path, "*.jsonl", id_column="id")
    with pytest.raises(InputError, match=f"input.id_column: 'id' {reason}"):
        read_all(tmp_path, "*.jsonl", id_column="id", unique_ids=True)


@pytest.mark.parametrize(
    ("lines", "declared", "are_one"),
    [
        (['{"a": 1, "b": 2}', '{"b": 2, "a": 1}'], None, True),
        (['{"a": 1}', '{"a": 1, "b": null}'], None, True),
        (["[1, 2]", "[2, 1]"], None, False),
        (["1", "1.0"], None, True),
        (["9007199254740993", "9007199254740992.0"], None, False),  # Beyond what numbers of both kinds hold: JSON text.
        (["1", '"1"'], None, False),  # JSON text: 1 and "1".
        (["1", '"1"'], "string", True),
        (["1", '"1"'], "int64", True),
        (["true", "1"], None, False),
        (['"1"', '"1.0"'], None, False),
        (['"1"', '"1.0"'], "float64", True),
        (['"2026-01-01"', '"2026-01-01T00:00:00"'], "timestamp[s]", True),
    ],
)
def test_two_ids_are_one_where_the_column_of_the_output_cannot_tell_them_apart(
    tmp_path: Path, lines: list[str], declared: str | None, are_one: bool
) -> None:
    (tmp_path / "in.jsonl").write_text("".join(f'{{"id": {each}, "prompt": "x"}}\n' for each in lines))
    options: dict[str, Any] = {"id_column": "id", **({"schema": {"id": declared}} if declared else {})}
    written = read_all(tmp_path, "in.jsonl", **options).table["id"].to_pylist()
    assert (written[0] == written[1]) is are_one
    if are_one:
        with pytest.raises(InputError, match=r"in row 0 of \S*in.jsonl and again in row 1"):
            read_all(tmp_path, "in.jsonl", unique_ids=True, **options)
    else:
        read_all(tmp_path, "in.jsonl", unique_ids=True, **options)


def test_ids_of_a_columnar_file_are_told_apart_in_a_column_of_any_type(tmp_path: Path) -> None:
    maps = pa.array([[("a", 1)], [("a", 2)]], pa.map_(pa.string(), pa.int64()))
    for name, ids in {
        "maps": maps,
        "words": pa.array(["a", "b"]).dictionary_encode(),
        "bytes": [b"a", b"\xff"],
    }.items():
        pq.write_table(pa.table({"id": ids}), tmp_path / f"{name}.parquet")
        read_all(tmp_path, f"{name}.parquet", id_column="id", unique_ids=True)


def test_ids_of_rows_that_are_not_answered_or_cannot_be_read_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": 1, "k": 1}\n{"id": 1, "k": 0}\n{"id": \n{"id": 2, "k": 1}\n')
    read_all(tmp_path, "in.jsonl", id_column="id", unique_ids=True, where="k == 1")


def test_equal_hashes_of_unequal_ids_are_no_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(values: list[Any]) -> Iterator[RowId]:
        return (RowId("f", row, value) for row, value in enumerate(values))

    monkeypatch.setattr(row_ids, "_hash", lambda column, row_id: 7)
    refuse_repeated_ids("id", lambda: read(["a", "b", 1, "1"]))
    refuse_repeated_ids("id", lambda: read([]))
    with pytest.raises(InputError, match='is "b" in row 1 of f and again in row 2 of f'):
        refuse_repeated_ids("id", lambda: read(["a", "b", "b"]))


def test_ids_that_were_checked_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "in.jsonl", [{"id": "a"}])
    config = InputConfig(path="in.jsonl", id_column="id", unique_ids=True)
    scan = scan_inputs(list_inputs(config, tmp_path), config)
    monkeypatch.setattr("batchgen.data.reader.refuse_repeated_ids", None)
    assert scan_inputs(list_inputs(config, tmp_path), config, scan) == scan
