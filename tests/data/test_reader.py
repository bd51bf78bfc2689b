"""The plan pass over all files, and reading by range."""

from __future__ import annotations

import datetime
import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.config import InputConfig
from batchgen.data.formats import jsonl
from batchgen.data.inputs import list_inputs
from batchgen.data.reader import InputScan, PromptReader, scan_inputs
from batchgen.errors import InputError
from batchgen.records import RowRange
from tests.data.reading import SHARED_DATA, read_all, write_jsonl


def plan(
    base: Path, path: str | list[str], known: InputScan | None = None, **config: Any
) -> tuple[InputScan, InputConfig]:
    given = InputConfig.model_validate({"path": path, **config})
    return scan_inputs(list_inputs(given, base), given, known), given


def test_columns_are_carried_in_the_order_asked_for(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", [{"a": 1, "b": "x", "c": True}])
    reading = read_all(tmp_path, "in.jsonl", columns=["c", "a"])
    assert reading.table.to_pydict() == {"c": [True], "a": [1]}
    assert reading.values == [{"a": 1, "b": "x", "c": True}]


def test_only_the_columns_that_the_prompt_needs_are_read(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", [{"a": 1, "b": "x"}, {"c": 2}])
    scan, config = plan(tmp_path, "in.jsonl")
    reader = PromptReader(scan, config, columns={"b"})
    assert [row.values for row in reader.read(RowRange(0, 0, 2))] == [{"b": "x"}, {"b": None}]
    reader.close()


def test_a_column_that_no_file_has_is_refused_with_near_names(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", [{"question": 1, "answer": 2}])
    with pytest.raises(InputError, match=r"no column 'Questions' in the input; did you mean 'question'\?"):
        plan(tmp_path, "in.jsonl", columns=["Questions"])
    with pytest.raises(InputError, match=r"no column 'zzz' in the input; it has 'question', 'answer'"):
        plan(tmp_path, "in.jsonl", schema={"zzz": "int64"})


def test_a_declared_type_is_the_columns_type_and_a_misfit_a_row_error(tmp_path: Path) -> None:
    rows = [{"id": 7, "at": "2026-01-02T03:04:05", "n": "12"}, {"id": "x", "at": None, "n": "no"}, {"id": {"a": 1}}]
    write_jsonl(tmp_path / "in.jsonl", rows)
    reading = read_all(tmp_path, "in.jsonl", schema={"id": "string", "at": "timestamp[us]", "n": "int16"})
    assert reading.errors == {1: "type_mismatch"}
    assert reading.rows[1].error == ("type_mismatch", "column 'n' holds a string that is no int16, as declared")
    assert reading.table.schema == pa.schema([("id", pa.string()), ("at", pa.timestamp("us")), ("n", pa.int16())])
    assert reading.table.to_pylist() == [
        {"id": "7", "at": datetime.datetime(2026, 1, 2, 3, 4, 5), "n": 12},
        {"id": "x", "at": None, "n": None},
        {"id": '{"a": 1}', "at": None, "n": None},
    ]


def test_a_declared_type_means_the_same_in_parquet(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": ["12", "no", None], "id": [1, 2, 3]}), tmp_path / "in.parquet")
    reading = read_all(tmp_path, "in.parquet", schema={"n": "int16", "id": "string"})
    assert reading.errors == {1: "type_mismatch"}
    assert reading.table.to_pydict() == {"n": [12, None, None], "id": ["1", "2", "3"]}


def test_a_scan_survives_json(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"a": [1]}\n\n\n{"a"}\n\n{"b": "x"}')
    scan, _ = plan(tmp_path, "in.jsonl")
    assert InputScan.from_json(scan.to_json()) == scan
    assert scan.ranges == (RowRange(0, 0, 6),)
    assert scan.files[0].skipped == ((1, 3), (4, 5))
    assert list(scan.files[0].rows(1, 6)) == [3, 5]
    assert [scan.files[0].count_rows(start, start + 2) for start in range(6)] == [1, 0, 1, 1, 1, 1]


def test_columns_keep_their_order_through_a_stored_scan(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", [{"id": 1, "b": {"z": 1, "a": 2}, "a": "x"}])
    scan, _ = plan(tmp_path, "in.jsonl")
    stored = InputScan.from_json(json.loads(json.dumps(scan.to_json(), sort_keys=True)))
    again, _ = plan(tmp_path, "in.jsonl", known=stored)
    assert again.schema == scan.schema
    assert scan.schema.names == ["id", "b", "a"]


def test_an_unchanged_file_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "b.jsonl", [{"a": 1}])
    scan, _ = plan(tmp_path, "*.jsonl")
    write_jsonl(tmp_path / "a.jsonl", [{"a": "x"}])
    scanned: list[str] = []
    original = jsonl.JsonlFormat.scan

    def counted(self: jsonl.JsonlFormat, file: Any, max_row_bytes: int) -> Any:
        scanned.append(file.name)
        return original(self, file, max_row_bytes)

    monkeypatch.setattr(jsonl.JsonlFormat, "scan", counted)
    again, _ = plan(tmp_path, "*.jsonl", known=scan)
    assert scanned == ["a.jsonl"]
    assert [(file.source, file.name) for file in again.files] == [(0, "a.jsonl"), (1, "b.jsonl")]
    assert again.files[1].sha256 == scan.files[0].sha256


def test_a_file_whose_content_changed_is_refused_and_a_touched_one_is_not(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", [{"a": 1}])
    scan, config = plan(tmp_path, "in.jsonl")
    os.utime(path, ns=(1, 1))
    with closing(PromptReader(scan, config)) as reader:
        assert len(list(reader.read(RowRange(0, 0, 1)))) == 1
    write_jsonl(path, [{"a": 2}])
    with pytest.raises(InputError, match=r"in\.jsonl: its content changed since the plan was made"):
        list(PromptReader(scan, config).read(RowRange(0, 0, 1)))
    path.unlink()
    with pytest.raises(InputError, match=r"in\.jsonl: is gone since the plan was made"):
        list(PromptReader(scan, config).read(RowRange(0, 0, 1)))


def test_rows_that_are_appended_while_a_run_is_at_work_are_no_harm(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", [{"a": 1}, {"a": 2}])
    scan, config = plan(tmp_path, "in.jsonl")
    with closing(PromptReader(scan, config)) as reader:
        for more in ('{"a": 3}\n', '{"a": 4}'):
            path.write_text(path.read_text() + more)
            for at in range(2):
                assert [row.values for row in reader.read(RowRange(0, at, at + 1))] == [{"a": at + 1}]
    scan, config = plan(tmp_path, "in.jsonl")
    path.write_text(path.read_text() + "\n")
    with closing(PromptReader(scan, config)) as reader:
        assert len(list(reader.read(RowRange(0, 0, 4)))) == 4
    path.write_text(path.read_text()[:-1] + "5}\n")  # Half of a last row was planned, and now it is whole.
    with pytest.raises(InputError, match=r"in\.jsonl: its content changed since the plan was made"):
        list(PromptReader(scan, config).read(RowRange(0, 0, 4)))


def test_an_open_file_that_is_rewritten_is_refused_and_one_that_is_replaced_is_read_on(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", [{"a": row} for row in range(4)])
    scan, config = plan(tmp_path, "in.jsonl")
    with closing(PromptReader(scan, config)) as reader:
        assert len(list(reader.read(RowRange(0, 0, 1)))) == 1
        assert len(list(reader.read_columns(RowRange(0, 0, 1)))) == 1
        write_jsonl(tmp_path / "new.jsonl", [{"a": 7}]).replace(path)
        assert [row.values["a"] for row in reader.read(RowRange(0, 1, 4))] == [1, 2, 3]
    write_jsonl(path, [{"a": row} for row in range(4)])
    scan, config = plan(tmp_path, "in.jsonl")
    with closing(PromptReader(scan, config)) as reader:
        assert len(list(reader.read(RowRange(0, 0, 1)))) == 1
        assert len(list(reader.read_columns(RowRange(0, 0, 1)))) == 1
        os.utime(path, ns=(1, 1))
        assert len(list(reader.read(RowRange(0, 1, 2)))) == 1
        write_jsonl(path, [{"a": 7} for row in range(4)])
        for read in (reader.read, reader.read_columns):
            with pytest.raises(InputError, match=r"in\.jsonl: its content changed since the plan was made"):
                list(read(RowRange(0, 2, 3)))


def test_a_file_that_may_not_be_read_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "in.jsonl", [{"a": 1}])

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InputError, match=r"in\.jsonl: cannot be read: Permission denied"):
        plan(tmp_path, "in.jsonl")


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="the public prompt sets are not here")
def test_real_prompt_sets_are_read_whole_with_their_types() -> None:
    reading = read_all(SHARED_DATA, ["gsm8k_test.jsonl", "HumanEval.jsonl.gz", "seed_tasks.jsonl"])
    assert reading.errors == {}
    assert [file.count_rows() for file in reading.scan.files] == [164, 1319, 175]
    types = {field.name: field.type for field in reading.scan.schema}
    assert types["instances"] == pa.list_(pa.struct([("input", pa.string()), ("output", pa.string())]))
    assert types["is_classification"] == pa.bool_()
    assert {types[name] for name in ("prompt", "question", "instruction")} == {pa.string()}
    carried = reading.table.to_pylist()
    assert [row.values for row in reading.rows] == carried
