"""Which rows are answered: those that an expression keeps, and a sample that a seed decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.config import InputConfig
from batchgen.data.inputs import list_inputs
from batchgen.data.reader import InputScan, scan_inputs
from batchgen.data.selection import sampled
from batchgen.errors import InputError
from tests.data.reading import read_all, write_jsonl


def scan_of(base: Path, path: str, known: InputScan | None = None, **config: Any) -> InputScan:
    given = InputConfig.model_validate({"path": path, **config})
    return scan_inputs(list_inputs(given, base), given, known)


def test_rows_for_which_the_expression_is_false_are_skipped_under_their_own_numbers(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", ({"n": number, "t": "x"} for number in range(10)))
    reading = read_all(tmp_path, "in.jsonl", where="n % 4 == 1 or n > 7", columns=["n"])
    assert [row.row for row in reading.rows] == [1, 5, 8, 9]
    assert reading.table.to_pydict() == {"n": [1, 5, 8, 9]}
    assert reading.scan.num_rows == 4
    assert reading.scan.files[0].num_rows == 10


def test_rows_are_chosen_in_every_format(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": list(range(3000))}), tmp_path / "in.parquet", row_group_size=700)
    (tmp_path / "in.csv").write_text("n\n" + "\n".join(map(str, range(3000))))
    for name, where in (("in.parquet", "n % 7 == 0"), ("in.csv", "(n | int) % 7 == 0")):
        reading = read_all(tmp_path, name, where=where)
        assert [row.row for row in reading.rows] == list(range(0, 3000, 7))
        assert [int(value) for value in reading.table.column("n").to_pylist()] == list(range(0, 3000, 7))


def test_scattered_rows_are_carried_in_few_tables(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", ({"n": number} for number in range(2000)))
    reading = read_all(tmp_path, "in.jsonl", where="n % 2 == 0")
    assert reading.table.column("n").num_chunks == 1000
    assert reading.table.num_rows == 1000


def test_a_row_that_cannot_be_read_is_kept_so_that_its_error_is_seen(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"n": 1}\n{"n"\n\n{"n": 2}\n')
    reading = read_all(tmp_path, "in.jsonl", where="n == 2")
    assert [(row.row, row.error is None) for row in reading.rows] == [(1, False), (3, True)]


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("m > 1", r"input\.where: no column 'm' in the input; it has 'n'"),
        ("n > 1", r"in\.jsonl: row 1: input\.where: TypeError: '>' not supported .*x is not none and x > 3"),
        ("n.a.b", r"row 0: input\.where: .* has no attribute"),
        ("n.__class__", r"row 0: input\.where: access to attribute '__class__'"),
        ("n | nofilter", r"input\.where: No filter named"),
    ],
)
def test_an_expression_that_is_wrong_is_refused_before_any_row_is_answered(
    tmp_path: Path, where: str, message: str
) -> None:
    write_jsonl(tmp_path / "in.jsonl", [{"n": 3}, {"n": None}])
    with pytest.raises(InputError, match=message):
        read_all(tmp_path, "in.jsonl", where=where)


def test_a_sample_is_the_same_for_a_seed_and_goes_over_all_files(tmp_path: Path) -> None:
    for name in ("1.jsonl", "2.jsonl"):
        write_jsonl(tmp_path / name, ({"n": number} for number in range(500)))
    one, again = (read_all(tmp_path, "*.jsonl", sample=20) for _ in range(2))
    other = read_all(tmp_path, "*.jsonl", sample=20, sample_seed=1)
    assert len(one.rows) == one.table.num_rows == 20
    assert one.rows == again.rows != other.rows
    assert {row.source for row in one.rows} == {0, 1}


def test_a_sample_is_taken_from_the_rows_that_the_expression_keeps(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", ({"n": number} for number in range(100)))
    reading = read_all(tmp_path, "in.jsonl", where="n < 10", sample=5)
    assert len(reading.rows) == 5
    assert all(row.values["n"] < 10 for row in reading.rows)
    assert len(read_all(tmp_path, "in.jsonl", where="n < 3", sample=5).rows) == 3


def test_a_selection_is_made_once_and_anew_when_it_or_the_input_changes(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", ({"n": number} for number in range(10)))
    scan = scan_of(tmp_path, "in.jsonl", where="n < 5")
    assert scan_of(tmp_path, "in.jsonl", known=scan, where="n < 5") == scan
    assert scan_of(tmp_path, "in.jsonl", known=scan, where="n < 6").num_rows == 6
    assert scan_of(tmp_path, "in.jsonl", known=scan).num_rows == 10
    write_jsonl(tmp_path / "in.jsonl", ({"n": number} for number in range(4)))
    assert scan_of(tmp_path, "in.jsonl", known=scan, where="n < 5").num_rows == 4


def test_a_seed_gives_the_same_sample_for_ever() -> None:
    assert sampled([range(10), range(5)], 5, seed=7) == [[0, 1, 3, 6, 8], []]


@given(sizes=st.lists(st.integers(0, 20), max_size=4), size=st.integers(1, 30), seed=st.integers(0, 99))
def test_a_sample_has_its_size_and_keeps_the_order(sizes: list[int], size: int, seed: int) -> None:
    chosen = sampled([range(each) for each in sizes], size, seed)
    assert sum(map(len, chosen)) == min(size, sum(sizes))
    for rows, each in zip(chosen, sizes, strict=True):
        assert rows == sorted(set(rows))
        assert all(row in range(each) for row in rows)


def test_every_row_is_as_likely_as_any_other() -> None:
    # 3 of 10 rows, 2000 times: each is drawn 600 times on average with a standard deviation of 20.5; all ten lie
    # within 5 of them for all but one in 100,000 choices of seeds, and the seeds are fixed.
    counts = [0] * 10
    for seed in range(2000):
        for row in sampled([range(10)], 3, seed)[0]:
            counts[row] += 1
    assert all(abs(count - 600) < 103 for count in counts)
