"""Plain text: one prompt a line."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from tests.data.reading import read_all


def test_a_line_is_a_row_and_a_blank_line_is_none(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes("\ufefffirst \u2028\r\n\n  \n\tthird".encode())
    reading = read_all(tmp_path, "in.txt")
    assert [(row.row, row.values["text"]) for row in reading.rows] == [(0, "first \u2028"), (3, "\tthird")]
    assert reading.table.schema == pa.schema([("text", pa.string())])


def test_a_line_that_is_not_utf_8_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"a\n\xe9\nb\n")
    reading = read_all(tmp_path, "in.txt")
    assert reading.errors == {1: "invalid_utf8"}
    assert reading.table.to_pydict() == {"text": ["a", None, "b"]}


def test_an_empty_file_has_the_column_and_no_rows(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"")
    reading = read_all(tmp_path, "in.txt", columns=["text"])
    assert reading.rows == []
    assert reading.table.schema == pa.schema([("text", pa.string())])
