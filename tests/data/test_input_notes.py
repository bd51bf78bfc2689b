"""What a user is told about inputs that are not all in order."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from batchgen.data.input_notes import input_notes
from tests.data.reading import read_all, write_jsonl


def test_nothing_is_told_of_inputs_that_are_in_order(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", [{"a": 1}])
    assert input_notes([], read_all(tmp_path, "in.jsonl").scan) == []


def test_rows_that_cannot_be_read_are_counted_and_the_first_is_shown(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "1.jsonl", [{"a": 1}])
    (tmp_path / "2.jsonl").write_bytes(b'{"a": 1}\n{"a"\n[]\n')
    (note,) = input_notes([], read_all(tmp_path, "*.jsonl").scan)
    assert note == (
        "2 rows that cannot be read are error rows; the first: 2.jsonl, row 1: bad_json: "
        "not JSON at character 5 of the line: Expecting ':' delimiter"
    )


def test_names_that_were_passed_over_are_listed_up_to_a_point_and_cannot_reach_the_terminal(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", [{"a": 1}])
    scan = read_all(tmp_path, "in.jsonl").scan
    assert input_notes(["_a\x1b[2J", "é"], scan) == ["passed over in the inputs: _a\\x1b[2J, é"]
    assert input_notes([f"_{number}" for number in range(12)], scan)[0].endswith("_9 and 2 more")


def test_columns_that_are_left_out_are_named(tmp_path: Path) -> None:
    table = pa.table({"p": ["a"], "gap": pa.array([(1, 2, 3)], pa.month_day_nano_interval())})
    with pa.ipc.new_file(tmp_path / "in.arrow", table.schema) as writer:
        writer.write_table(table)
    scan = read_all(tmp_path, "in.arrow").scan
    assert input_notes([], scan) == ["columns left out, since Parquet cannot hold them: gap"]
