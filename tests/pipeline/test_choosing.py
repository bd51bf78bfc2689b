from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchgen.config import InputConfig
from batchgen.data.inputs import list_inputs
from batchgen.data.reader import scan_inputs
from batchgen.errors import InputError
from batchgen.pipeline.bounded_reader import DecodingInChildren
from batchgen.pipeline.child import Limits
from batchgen.pipeline.choosing import choose_rows_in_child
from tests.data.reading import write_jsonl


def chosen(base: Path, where: str, rows: list[Any], limits: Limits = Limits()) -> list[list[int]]:  # noqa: B008
    write_jsonl(base / "1.jsonl", rows)
    write_jsonl(base / "2.jsonl", rows[:1])
    config = InputConfig(path="*.jsonl", where=where)
    scan = scan_inputs(list_inputs(config, base), InputConfig(path="*.jsonl"))
    return list(choose_rows_in_child(scan, config, limits))


def test_the_child_chooses_what_this_process_would(tmp_path: Path) -> None:
    rows = [{"x": number} for number in range(200)]
    assert chosen(tmp_path, "x % 70 == 0", rows) == [[0, 70, 140], [0]]
    config = InputConfig(path="*.jsonl", where="x % 70 == 0")
    here = scan_inputs(list_inputs(config, tmp_path), config)
    assert scan_inputs(list_inputs(config, tmp_path), config, decoding=DecodingInChildren()) == here


def test_an_expression_that_does_not_come_back_ends_with_its_rows(tmp_path: Path) -> None:
    where = "x < 3 or (range(99999) | map('string') | map('length') | list | sort | list | sort | length) * 0 == 1"
    with pytest.raises(InputError, match=r"1\.jsonl: rows 0 to 3: input\.where takes more than 0\.05 s; simplify it"):
        chosen(tmp_path, where, [{"x": 1}, {"x": 2}, {"x": 5}, {"x": 6}], Limits(step_seconds=0.05))


def test_an_expression_that_takes_all_memory_ends_alone(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"input\.where"):
        chosen(tmp_path, "('a' * (x * 1000000000)) == ''", [{"x": 9}])


def test_what_is_wrong_with_a_row_or_a_name_is_said_as_ever(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"1\.jsonl: row 1: input\.where: .*a null value must be asked for"):
        chosen(tmp_path, "x > 1", [{"x": 1}, {"x": None}])
    with pytest.raises(InputError, match=r"input\.where: no column 'y' in the input"):
        chosen(tmp_path, "y > 1", [{"x": 1}])
