"""Finished rows become Arrow tables in the declared schema, whatever the rows hold."""

from __future__ import annotations

import pyarrow as pa
import pytest

from batchgen.data.rows import FinishedRow, KeptColumns
from batchgen.data.schema import OutputLayout, output_schema
from batchgen.data.table import estimated_bytes, output_table, output_tables, rows_out
from batchgen.records import RowError
from tests.data.shards import LAYOUT, row, sample, source

BAD = RowError("prompt_too_long", "9000 tokens")


def one_table(rows: list[FinishedRow], layout: OutputLayout = LAYOUT) -> pa.Table:
    return output_table(source(rows), rows, layout, output_schema(layout))


def sizes(rows: list[FinishedRow], max_bytes: int, topic: str = "sea") -> list[int]:
    pieces = output_tables([source(rows, topic)], rows, LAYOUT, output_schema(LAYOUT), max_bytes)
    return [len(piece) for piece in pieces]


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


@pytest.mark.case(41)
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


@pytest.mark.case(43)
def test_large_rows_are_split_before_an_offset_can_overflow() -> None:
    assert sizes([row(number, sample("x")) for number in range(3)], 2 * 10**6, topic="y" * 10**6) == [1, 1, 1]


def test_a_row_larger_than_the_limit_is_a_table_of_its_own() -> None:
    rows = [row(0, sample("x")), row(1, sample("x")), row(2, sample("x" * 5000)), row(3, sample("x"))]
    assert sizes(rows, 1000) == [2, 1, 1]


def test_rows_keep_their_order_over_several_source_tables() -> None:
    rows = [row(number, sample(f"text {number}")) for number in range(6)]
    pieces = [source(rows[:1]), source(rows[1:1]), source(rows[1:])]
    joined = pa.concat_tables(output_tables(pieces, rows, LAYOUT, output_schema(LAYOUT), 500))
    assert joined["id"].to_pylist() == list(range(6))
    assert joined["completions"].to_pylist() == [[f"text {number}"] for number in range(6)]


def test_exploded_rows_count_their_source_values_once_per_sample() -> None:
    rows = [row(0, sample(), sample())]
    assert estimated_bytes(source(rows, "y" * 1000), rows) > 2000


def test_rows_out_counts_samples_only_where_they_are_exploded() -> None:
    rows = [row(0, sample(), sample()), row(1, error=BAD)]
    assert rows_out(rows, LAYOUT) == 2
    assert rows_out(rows, LAYOUT._replace(samples="explode")) == 3


def test_a_missing_row_is_a_bug_and_never_a_shift() -> None:
    rows = [row(0, sample()), row(1, sample())]
    with pytest.raises(AssertionError, match="fewer finished rows"):
        list(output_tables([source(rows)], rows[:1], LAYOUT, output_schema(LAYOUT), 1000))
    with pytest.raises(AssertionError, match="more finished rows"):
        list(output_tables([source(rows[:1])], rows, LAYOUT, output_schema(LAYOUT), 1000))


def test_rows_may_carry_no_source_columns_at_all() -> None:
    layout = LAYOUT._replace(source_schema=pa.schema([]))
    rows = [row(number, sample()) for number in range(3)]
    (joined,) = output_tables([], rows, layout, output_schema(layout), 10**6)
    assert joined.column_names == ["completions", "batchgen"]
    assert joined.num_rows == 3
