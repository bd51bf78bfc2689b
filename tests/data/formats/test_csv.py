"""CSV and TSV: cells are text, records may span lines, and a bad record harms no other."""

from __future__ import annotations

import csv
import gzip
import io
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchgen.config import InputConfig
from batchgen.data.inputs import list_inputs
from batchgen.data.reader import PromptReader, scan_inputs
from batchgen.errors import InputError
from batchgen.records import RowRange
from tests.data.reading import read_all


@pytest.mark.case(6)
def test_cells_are_their_literal_text(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_bytes(b'id,prompt\n001,NA\n002,null\n003,""\n007,n/a\n')
    reading = read_all(tmp_path, "in.csv")
    assert reading.table.to_pydict() == {"id": ["001", "002", "003", "007"], "prompt": ["NA", "null", "", "n/a"]}
    assert reading.table.schema == pa.schema([("id", pa.string()), ("prompt", pa.string())])
    assert reading.values[2] == {"id": "003", "prompt": ""}


def test_declared_columns_have_their_types(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_bytes(b"id,n\n007,1.5\n008,x\n")
    reading = read_all(tmp_path, "in.csv", schema={"n": "float64"})
    assert reading.errors == {1: "type_mismatch"}
    assert reading.table.to_pydict() == {"id": ["007", "008"], "n": [1.5, None]}


def test_a_quoted_cell_may_hold_delimiters_quotes_and_line_breaks(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_bytes('a,b\r\n"x, ""y""\r\nz\u2028",1\r\n\r\n2,3'.encode())
    reading = read_all(tmp_path, "in.csv")
    assert [(row.row, row.values) for row in reading.rows] == [
        (0, {"a": 'x, "y"\nz\u2028', "b": "1"}),
        (2, {"a": "2", "b": "3"}),
    ]


def test_tabs_separate_the_cells_of_tsv(tmp_path: Path) -> None:
    (tmp_path / "in.tsv").write_bytes(b"\xef\xbb\xbfa\tb\n1,2\t3\n")
    assert read_all(tmp_path, "in.tsv").values == [{"a": "1,2", "b": "3"}]


def test_a_bad_record_is_an_error_and_its_neighbours_stay(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_bytes(b'a,b\n1,2\n1\n1,2,3\n"x"y,2\nx\ry,2\n\xff,2\n3,4\n')
    reading = read_all(tmp_path, "in.csv")
    assert reading.errors == {
        1: "wrong_field_count",
        2: "wrong_field_count",
        3: "bad_csv",
        4: "bad_csv",
        5: "invalid_utf8",
    }
    assert reading.values == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]
    assert reading.table.num_rows == 7


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'a,b\n1,2\n"x,3\n4,5\n', r"record in line 3 does not end before the end of the file"),
        (b"a,a\n1,2\n", r"has more than one column named 'a'"),
        (b"\n1,2\n", r"the first line is blank"),
        (b'"a"b,c\n', r"the header cannot be read"),
        (b"\xff,b\n", r"the header is not UTF-8"),
    ],
)
def test_a_file_that_is_wrong_as_a_whole_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "in.csv").write_bytes(content)
    with pytest.raises(InputError, match=rf"in\.csv: .*{message}"):
        read_all(tmp_path, "in.csv")


def test_limits_hold_for_lines_and_for_whole_records(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_bytes(b"a\n" + b"x" * 100 + b"\n1\n")
    assert read_all(tmp_path, "in.csv", max_row_bytes=50).errors == {0: "row_too_long"}
    (tmp_path / "in.csv").write_bytes(b'a\n"' + b"x\n" * 100 + b'"\n')
    with pytest.raises(InputError, match="record in line 2 does not end within 50 bytes"):
        read_all(tmp_path, "in.csv", max_row_bytes=50)


@pytest.mark.parametrize("name", ["in.csv", "in.csv.gz"])
def test_any_range_is_read_whatever_the_lines_of_a_record(tmp_path: Path, name: str) -> None:
    content = "n,t\n" + "".join(f'{number},"{"x" * (number % 3)}\n"\n' for number in range(3000))
    (tmp_path / name).write_bytes(gzip.compress(content.encode()) if name.endswith("gz") else content.encode())
    config = InputConfig(path=name)
    scan = scan_inputs(list_inputs(config, tmp_path), config)
    assert len(scan.files[0].offsets) == 3
    with closing(PromptReader(scan, config)) as reader:
        for start, stop in [(0, 2), (2047, 2050), (1024, 1025), (2999, 3100), (5, 6)]:
            rows = list(reader.read(RowRange(0, start, stop)))
            assert [row.values["n"] for row in rows] == [str(number) for number in range(start, min(stop, 3000))]


def test_no_rows_give_the_columns_of_the_header(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_bytes(b"a,b\n")
    assert read_all(tmp_path, "in.csv").table.schema == pa.schema([("a", pa.string()), ("b", pa.string())])
    (tmp_path / "in.csv").write_bytes(b"")
    assert read_all(tmp_path, "in.csv").rows == []


CELLS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), max_size=6)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.tuples(CELLS, CELLS), max_size=8))
def test_whatever_the_csv_module_writes_comes_back(tmp_path: Path, rows: list[tuple[str, str]]) -> None:
    text = io.StringIO()
    csv.writer(text).writerows([("a", "b"), *rows])
    (tmp_path / "in.csv").write_bytes(text.getvalue().encode())
    reading = read_all(tmp_path, "in.csv")
    assert [(row["a"], row["b"]) for row in reading.values] == rows


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.sampled_from([b'"', b",", b"\n", b"\r", b"a", b"\xff", b"\x00", b'""'])))
def test_no_bytes_raise_anything_but_an_input_error(tmp_path: Path, parts: list[bytes]) -> None:
    (tmp_path / "in.csv").write_bytes(b"".join(parts))
    try:
        reading = read_all(tmp_path, "in.csv")
    except InputError:
        return
    assert len(reading.rows) == reading.scan.num_rows
