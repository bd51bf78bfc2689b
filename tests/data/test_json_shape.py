"""The type of a JSON column is the narrowest that loses nothing."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from batchgen.data.json_shape import MAX_DEPTH, MAX_FIELDS, JsonShape


def shape_of(*values: Any) -> JsonShape:
    shape = JsonShape()
    for value in values:
        shape.observe(value)
    return shape


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth else [1]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([], pa.null()),
        ([None], pa.null()),
        ([True, None], pa.bool_()),
        ([1, -(2**63), 2**63 - 1], pa.int64()),
        ([1, 2**63], None),
        ([1, 2.5], pa.float64()),
        ([2**53 + 1, 2.5], None),
        (["a"], pa.string()),
        (["a", 1], None),
        ([True, 1], None),
        ([[], None], pa.list_(pa.null())),
        ([[1], [None, 2.5]], pa.list_(pa.float64())),
        ([[1], ["a"]], None),
        ([{"a": 1}, {"b": None}], pa.struct([("a", pa.int64()), ("b", pa.null())])),
        ([{"a": 1}, {"a": "x"}], None),
        ([{}], None),
        ([{"a": {}}], None),
        ([{"a": 1}, [1]], None),
        ([nested(MAX_DEPTH - 1), nested(MAX_DEPTH)], None),
        ([{f"k{number}": 1 for number in range(MAX_FIELDS + 1)}], None),
    ],
)
def test_values_of_a_column_decide_its_type(values: list[Any], kind: pa.DataType | None) -> None:
    assert shape_of(*values).arrow_type() == kind


def test_the_deepest_list_that_is_typed() -> None:
    assert shape_of(nested(MAX_DEPTH - 1)).arrow_type() is not None


def test_merged_shapes_equal_one_that_saw_everything() -> None:
    first, second = [{"a": [1]}, None], [{"a": [2.5], "b": {"c": "x"}}]
    merged = shape_of(*first)
    merged.merge(shape_of(*second))
    assert merged.to_json() == shape_of(*first, *second).to_json()
    assert JsonShape.from_json(merged.to_json()).arrow_type() == merged.arrow_type()
