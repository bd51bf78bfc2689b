"""JSON lines: every row that is right comes back as it was, every row that is wrong says why."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchgen.config import InputConfig
from batchgen.data import text_lines
from batchgen.data.arrow_types import is_json_text
from batchgen.data.formats import jsonl
from batchgen.data.formats.jsonl import RowFailure, parse_row
from batchgen.data.inputs import list_inputs
from batchgen.data.reader import PromptReader, scan_inputs
from batchgen.errors import InputError
from batchgen.records import RowRange
from tests.data.reading import read_all, write_jsonl


@pytest.mark.case(1)
def test_byte_order_mark_changes_neither_rows_nor_schema(tmp_path: Path) -> None:
    plain = b'{"prompt": "a"}\n{"prompt": "b"}\n'
    (tmp_path / "plain.jsonl").write_bytes(plain)
    (tmp_path / "marked.jsonl").write_bytes(b"\xef\xbb\xbf" + plain)
    one, other = read_all(tmp_path, "plain.jsonl"), read_all(tmp_path, "marked.jsonl")
    assert other.values == one.values == [{"prompt": "a"}, {"prompt": "b"}]
    assert other.table.equals(one.table)


@pytest.mark.case(2)
def test_only_lf_ends_a_row_and_blank_lines_keep_their_numbers(tmp_path: Path) -> None:
    text = '{"p": "a\u2028b"}\r\n{"p": "c\x85d"}\r\n \t\r\n{"p": "e\u2029"}'
    (tmp_path / "in.jsonl").write_bytes(text.encode())
    reading = read_all(tmp_path, "in.jsonl")
    assert [(row.row, row.values["p"]) for row in reading.rows] == [(0, "a\u2028b"), (1, "c\x85d"), (3, "e\u2029")]
    assert reading.scan.num_rows == 3
    assert reading.scan.files[0].num_rows == 4
    assert list(reading.scan.files[0].rows()) == [0, 1, 3]
    assert reading.table.column("p").to_pylist() == ["a\u2028b", "c\x85d", "e\u2029"]


@pytest.mark.case(3)
def test_a_bad_row_is_an_error_and_its_neighbours_stay(tmp_path: Path) -> None:
    lines = [b'{"prompt": "%d"}' % number for number in range(10)]
    lines[3] = b'{"prompt":'
    lines[6] = b'{"prompt": "\xff"}'
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
    reading = read_all(tmp_path, "in.jsonl")
    assert reading.errors == {3: "bad_json", 6: "invalid_utf8"}
    assert len(reading.rows) == reading.table.num_rows == 10
    assert reading.table.column("prompt").to_pylist()[2:5] == ["2", None, "4"]
    assert reading.scan.files[0].num_bad_rows == 2


@pytest.mark.case(3)
def test_on_error_fail_names_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"a": 1}\n{"a":\n')
    with pytest.raises(InputError, match=r"in\.jsonl:2: bad_json: not JSON at character 6"):
        read_all(tmp_path, "in.jsonl", on_error="fail")


@pytest.mark.case(12)
@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        (b'{"a": 1, "a": 2}', "duplicate_key", "the key 'a' stands twice"),
        (b'{"a": {"b": 1, "b": 1}}', "duplicate_key", "the key 'b' stands twice"),
        (b'{"a": NaN}', "bad_json", "NaN is not JSON"),
        (b'{"a": -Infinity}', "bad_json", "-Infinity is not JSON"),
        (b'{"a": 1e999}', "bad_json", "beyond the range"),
        (b"[1]", "not_an_object", "holds an array"),
        (b'"text"', "not_an_object", "holds a string"),
        (b"null", "not_an_object", "holds null"),
        (b"true", "not_an_object", "holds a boolean"),
        (b"1.5", "not_an_object", "holds a number"),
        (b'{"a": "\\ud800"}', "invalid_utf8", "half of a surrogate pair"),
        (b'{"\\udc00": 1}', "invalid_utf8", "half of a surrogate pair"),
        (b'{"a": 1} {"a": 2}', "bad_json", "Extra data"),
        (b'{"a": "\t"}', "bad_json", "Invalid control character"),
        (b"[" * 100_000, "bad_json", "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "bad_json", "too many digits"),
        (b"\xef\xbb\xbf{}", "bad_json", "not JSON at character 1"),
        (b"\x00", "bad_json", "not JSON at character 1"),
        (None, "row_too_long", "longer than the limit"),
    ],
)
def test_each_fault_of_a_line_has_its_code(line: bytes | None, code: str, message: str) -> None:
    with pytest.raises(RowFailure, match=message) as caught:
        parse_row(line)
    assert caught.value.error.code == code


def test_a_surrogate_pair_is_a_character(tmp_path: Path) -> None:
    assert parse_row(b'{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}


@pytest.mark.case(4)
def test_a_column_null_at_first_takes_the_type_of_a_later_file(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "1.jsonl", ({"p": "x", "meta": None} for _ in range(3000)))
    write_jsonl(tmp_path / "2.jsonl", [{"p": "x", "meta": "y"}])
    reading = read_all(tmp_path, "*.jsonl")
    assert reading.scan.schema.field("meta").type == pa.string()
    assert reading.table.column("meta").to_pylist() == [None] * 3000 + ["y"]


@pytest.mark.case(5)
def test_a_column_of_many_kinds_is_kept_as_json_text(tmp_path: Path) -> None:
    values = ["a", 7, {"x": 1}, None, True]
    write_jsonl(tmp_path / "in.jsonl", ({"prompt": value} for value in values))
    reading = read_all(tmp_path, "in.jsonl")
    assert [row.values["prompt"] for row in reading.rows] == values
    assert is_json_text(reading.scan.schema.field("prompt"))
    assert reading.table.column("prompt").to_pylist() == ['"a"', "7", '{"x": 1}', None, "true"]


def test_a_line_beyond_the_limit_is_a_row_error_and_the_next_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_lines, "_SKIP_BYTES", 7)
    write_jsonl(tmp_path / "in.jsonl", [{"p": "x" * size} for size in (10, 500, 20)])
    reading = read_all(tmp_path, "in.jsonl", max_row_bytes=100)
    assert reading.errors == {1: "row_too_long"}
    assert [len(row.values["p"]) for row in reading.rows if not row.error] == [10, 20]


def test_an_empty_file_has_no_rows_and_every_column_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b"")
    reading = read_all(tmp_path, "in.jsonl", columns=["id"])
    assert reading.rows == []
    assert reading.table.schema == pa.schema([("id", pa.string())])


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{\n "a": 1\n}\n{\n "a": 2\n}\n', "is JSON with an object over several lines; convert it"),
        (b"PAR1\x15\x04\n\xa0PAR1", "is a Parquet file; name it .parquet, or set input.format"),
    ],
)
def test_what_holds_no_line_that_is_a_row_is_told_apart(
    tmp_path: Path, content: bytes, message: str, suffix: str
) -> None:
    (tmp_path / f"in.jsonl{suffix}").write_bytes(gzip.compress(content) if suffix else content)
    with pytest.raises(InputError, match=message):
        read_all(tmp_path, f"in.jsonl{suffix}")


def test_lines_that_are_all_too_long_are_rows_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"a": "long enough"}\n{"a": "long enough too"}\n')
    reading = read_all(tmp_path, "in.jsonl", max_row_bytes=10)
    assert reading.errors == {0: "row_too_long", 1: "row_too_long"}


def test_an_array_instead_of_lines_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "in.json").write_text(json.dumps([{"a": 1}], indent=1))
    with pytest.raises(InputError, match="is a JSON array, not one object a line"):
        read_all(tmp_path, "in.json")


def test_utf_16_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes('{"a": 1}\n'.encode("utf-16"))
    with pytest.raises(InputError, match="is UTF-16; convert it"):
        read_all(tmp_path, "in.jsonl")


def test_rows_with_ever_new_keys_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_COLUMNS", 5)
    write_jsonl(tmp_path / "in.jsonl", ({f"k{number}": 1} for number in range(6)))
    with pytest.raises(InputError, match=r"in\.jsonl: the rows have more than 5 different keys, the last is 'k5'"):
        read_all(tmp_path, "in.jsonl")


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
}


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_compressed_rows_equal_plain_ones_from_any_row_on(tmp_path: Path, suffix: str) -> None:
    write_jsonl(tmp_path / "in.jsonl", ({"n": number, "t": "é" * (number % 50)} for number in range(5000)))
    compressed = COMPRESSORS[suffix]((tmp_path / "in.jsonl").read_bytes())
    (tmp_path / f"in.jsonl.{suffix}").write_bytes(compressed)
    assert read_all(tmp_path, f"in.jsonl.{suffix}").values == read_all(tmp_path, "in.jsonl").values
    config = InputConfig(path=f"in.jsonl.{suffix}")
    reader = PromptReader(scan_inputs(list_inputs(config, tmp_path), config), config)
    for start in (4000, 10, 4999, 2048):
        assert [row.values["n"] for row in reader.read(RowRange(0, start, start + 2))] == [start, start + 1][
            : 5000 - start
        ]
    reader.close()


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_a_cut_archive_is_refused_by_name(tmp_path: Path, suffix: str) -> None:
    data = json.dumps({"a": random.Random(1).randbytes(5000).hex()}).encode()
    for length in (0, -5):
        (tmp_path / f"in.jsonl.{suffix}").write_bytes(COMPRESSORS[suffix](data)[:length])
        with pytest.raises(InputError, match=rf"in\.jsonl\.{suffix}: the archive is (empty|cut or damaged)"):
            read_all(tmp_path, f"in.jsonl.{suffix}")


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_archives_behind_one_another_are_read_to_the_last_byte(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"in.jsonl.{suffix}"
    parts = [b'{"n": 1}\n', b"", b'{"n": 2}\n']
    path.write_bytes(b"".join(COMPRESSORS[suffix](part) for part in parts) + (b"" if suffix == "zst" else b"\0" * 8))
    assert read_all(tmp_path, path.name).values == [{"n": 1}, {"n": 2}]
    path.write_bytes(COMPRESSORS[suffix](parts[0]) + b"no head of an archive")
    with pytest.raises(InputError, match=rf"in\.jsonl\.{suffix}: the archive is cut or damaged"):
        read_all(tmp_path, path.name)


def test_any_range_is_read_from_the_nearest_offset(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", ({"n": number} for number in range(5000)))
    config = InputConfig(path="in.jsonl")
    scan = scan_inputs(list_inputs(config, tmp_path), config)
    assert len(scan.files[0].offsets) == 5
    reader = PromptReader(scan, config)
    for start, stop in [(0, 3), (1023, 1026), (4998, 9000), (2, 2), (1024, 1025), (7000, 7001)]:
        assert [row.row for row in reader.read(RowRange(0, start, stop))] == list(range(start, min(stop, 5000)))
    reader.close()


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.dictionaries(st.sampled_from(["a", "b", "c d", "c.d", ""]), JSON_VALUES, max_size=4), max_size=8)
)
def test_any_json_comes_back_with_its_rows_types_and_values(tmp_path: Path, rows: list[dict[str, object]]) -> None:
    write_jsonl(tmp_path / "in.jsonl", rows)
    reading = read_all(tmp_path, "in.jsonl")
    assert reading.errors == {}
    names = reading.scan.source_schema.names
    assert reading.values == [{name: row.get(name) for name in names} for row in rows]
    for field in reading.scan.schema:
        assert not pa.types.is_null(field.type)
        carried = reading.table.column(field.name).to_pylist()
        for row, value in zip(rows, carried, strict=True):
            if is_json_text(field):
                assert (None if value is None else json.loads(value)) == row.get(field.name)
            else:
                assert _without_nulls(value) == _without_nulls(row.get(field.name))


def _without_nulls(value: object) -> object:
    """A struct of Arrow does not tell a field that is null from one that is not there."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.lists(st.binary(max_size=6) | st.sampled_from([b'{"a":', b"1}", b'"', b"\n", b"\r\n", b"[", b"\xff"])))
def test_no_bytes_raise_anything_but_an_input_error(tmp_path: Path, data: list[bytes]) -> None:
    content = b"".join(data)
    (tmp_path / "in.jsonl").write_bytes(content)
    try:
        reading = read_all(tmp_path, "in.jsonl")
    except InputError:
        return
    assert len(reading.rows) == reading.table.num_rows == reading.scan.num_rows or not reading.scan.schema.names
    assert reading.scan.files[0].num_rows == len(content.split(b"\n")) - content.endswith(b"\n") - (not content)
