"""Finished rows become Arrow tables in the declared schema, whatever the rows hold."""

from __future__ import annotations

import pyarrow as pa
import pytest

from batchgen.data.rows import KeptColumns
from batchgen.data.schema import OutputLayout, output_schema
from batchgen.data.table import OutputRow, estimated_bytes, table, tables
from batchgen.errors import InputError
from batchgen.records import RowError
from tests.data.shards import LAYOUT, row, sample

BAD = RowError("prompt_too_long", "9000 tokens")


def one_table(rows: list[OutputRow], layout: OutputLayout = LAYOUT) -> pa.Table:
    return table(rows, layout, output_schema(layout))


def test_a_row_keeps_its_columns_beside_its_samples() -> None:
    (cells,) = one_table([row(3, sample("a"), sample("b", finish_reason="length"))]).to_pylist()
    assert (cells["id"], cells["topic"], cells["completions"]) == (3, "sea", ["a", "b"])
    assert cells["batchgen"]["finish_reason"] == ["stop", "length"]
    assert (cells["batchgen"]["status"], cells["batchgen"]["sample"]) == ("ok", None)


def test_an_error_row_has_its_reason_and_null_samples() -> None:
    (cells,) = one_table([row(3, error=BAD)]).to_pylist()
    assert cells["completions"] is None
    assert cells["batchgen"]["error_code"] == "prompt_too_long"
    assert (cells["batchgen"]["status"], cells["batchgen"]["completion_tokens"]) == ("error", None)


def test_the_good_samples_of_an_error_row_are_kept() -> None:
    (cells,) = one_table([row(3, sample("a"), sample(None, finish_reason=None), error=BAD)]).to_pylist()
    assert cells["completions"] == ["a", None]
    assert cells["batchgen"]["status"] == "error"


def test_exploded_samples_are_rows_and_an_error_row_appears_once() -> None:
    layout = LAYOUT._replace(samples="explode")
    cells = one_table([row(0, sample("a"), sample("b")), row(1, error=BAD)], layout).to_pylist()
    assert [each["completion"] for each in cells] == ["a", "b", None]
    assert [each["batchgen"]["sample"] for each in cells] == [0, 1, None]
    assert [each["id"] for each in cells] == [0, 0, 1]


def test_tables_of_nulls_have_the_schema_of_tables_of_values() -> None:
    layout = LAYOUT._replace(kept=KeptColumns(token_ids=True, logprobs=True))
    full = one_table([row(0, sample(token_ids=[1], logprobs=[[(1, -0.5, 1)]]))], layout)
    empty = one_table([row(1, error=BAD)], layout)
    assert full.schema == empty.schema
    assert pa.concat_tables([full, empty]).num_rows == 2


def test_prefixed_columns_are_filled() -> None:
    layout = LAYOUT._replace(prefix="x_", kept=KeptColumns(token_ids=True))
    (cells,) = one_table([row(0, sample("a", token_ids=[4]))], layout).to_pylist()
    assert (cells["x_completions"], cells["x_token_ids"]) == (["a"], [[4]])


def test_large_rows_are_split_before_an_offset_can_overflow() -> None:
    rows = [row(number, sample("x"), topic="y" * 10**6) for number in range(3)]
    pieces = list(tables(rows, LAYOUT, output_schema(LAYOUT), 2 * 10**6))
    assert [len(piece) for piece in pieces] == [1, 1, 1]
    assert [piece["id"].to_pylist() for piece in pieces] == [[0], [1], [2]]


def test_a_row_larger_than_the_limit_is_a_table_of_its_own() -> None:
    rows = [row(0, sample("x")), row(1, sample("x" * 5000)), row(2, sample("x"))]
    assert [len(piece) for piece in tables(rows, LAYOUT, output_schema(LAYOUT), 1000)] == [1, 1, 1]


def test_exploded_rows_count_their_source_values_once_per_sample() -> None:
    assert estimated_bytes(row(0, sample(), sample(), topic="y" * 1000)) > 2000


def test_a_value_of_another_type_becomes_json_text_in_a_text_column() -> None:
    odd = OutputRow({"id": 1, "topic": {"a": [1, "é"]}}, row(0).finished)
    assert one_table([odd])["topic"].to_pylist() == ['{"a": [1, "é"]}']


def test_a_value_that_cannot_be_stored_names_its_column() -> None:
    with pytest.raises(InputError, match=r"column id: .*int64"):
        one_table([OutputRow({"id": "seven"}, row(0).finished)])


def test_a_column_missing_from_a_row_is_null() -> None:
    assert one_table([OutputRow({}, row(0).finished)])["topic"].to_pylist() == [None]
