"""One type for a column of many files, and values into it."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal

import pyarrow as pa
import pytest

from batchgen.data.arrow_types import (
    cast_or_convert,
    concrete,
    fits,
    is_json_text,
    json_text,
    json_text_field,
    to_array,
    unify,
    unify_types,
)


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (pa.null(), pa.int8(), pa.int8()),
        (pa.int8(), pa.uint32(), pa.int64()),
        (pa.int64(), pa.uint64(), None),
        (pa.int32(), pa.float32(), pa.float64()),
        (pa.float16(), pa.float32(), pa.float32()),
        (pa.string(), pa.large_string(), pa.large_string()),
        (pa.dictionary(pa.int8(), pa.string()), pa.string(), pa.string()),
        (pa.list_(pa.int8()), pa.large_list(pa.float32()), pa.list_(pa.float64())),
        (pa.list_(pa.int8()), pa.list_(pa.string()), None),
        (
            pa.struct([("a", pa.int8())]),
            pa.struct([("b", pa.string())]),
            pa.struct([("a", pa.int8()), ("b", pa.string())]),
        ),
        (pa.struct([("a", pa.int8())]), pa.struct([("a", pa.string())]), None),
        (pa.timestamp("s"), pa.timestamp("ns"), pa.timestamp("ns")),
        (pa.timestamp("s", "UTC"), pa.timestamp("s"), None),
        (pa.string(), pa.int8(), None),
        (pa.bool_(), pa.int8(), None),
        (pa.date32(), pa.timestamp("s"), None),
    ],
)
def test_two_types_have_one_that_holds_both_or_none(
    one: pa.DataType, other: pa.DataType, both: pa.DataType | None
) -> None:
    assert unify_types(one, other) == both
    assert unify_types(other, one) == both or pa.types.is_struct(one)


def test_columns_of_no_common_type_become_json_text() -> None:
    schema = unify([pa.schema([("a", pa.int8()), ("b", pa.int8())]), pa.schema([("b", pa.string())])])
    assert schema.names == ["a", "b"]
    assert is_json_text(schema.field("b"))
    assert is_json_text(unify([schema, pa.schema([("b", pa.string())])]).field("b"))


def test_null_types_become_strings_at_any_depth() -> None:
    nested = pa.struct([("x", pa.list_(pa.null())), ("y", pa.map_(pa.string(), pa.null())), ("z", pa.int8())])
    expected = pa.struct([("x", pa.list_(pa.string())), ("y", pa.map_(pa.string(), pa.string())), ("z", pa.int8())])
    assert concrete(nested) == expected
    assert concrete(pa.list_(pa.null(), 2)) == pa.list_(pa.string(), 2)
    assert concrete(pa.large_list(pa.null())) == pa.large_list(pa.string())
    assert concrete(pa.dictionary(pa.int8(), pa.null())) == pa.string()


def test_a_value_that_does_not_fit_is_null_and_its_neighbours_stay() -> None:
    field = pa.field("n", pa.int8())
    assert to_array([1, "x", 300, "7", None, 2.0], field).to_pylist() == [1, None, None, 7, None, 2]
    assert [fits(value, field) for value in (1, "x", 300, "7", None)] == [True, False, False, True, True]


@pytest.mark.parametrize(
    ("value", "kind", "kept"),
    [
        (1.5, "int64", False),
        (1.0, "int64", True),
        (float("nan"), "int64", False),
        (Decimal("1.5"), "int8", False),
        (Decimal("2"), "int8", True),
        (1.5, "date32", False),
        (1.5, "float32", True),
        (datetime.datetime(2020, 1, 1, 1), "date32", False),
        (datetime.datetime(2020, 1, 1), "date32", True),
        (datetime.datetime(2020, 1, 1, 1, 2, 3, 4000), "timestamp[s]", False),
        (datetime.datetime(2020, 1, 1, 1, 2, 3, 4000), "timestamp[ms]", True),
        (datetime.time(1, 2, 3, 4), "time32[ms]", False),
        (datetime.time(1, 2, 3, 4), "time64[us]", True),
    ],
)
def test_a_value_fits_only_where_nothing_of_it_is_cut_off(value: object, kind: str, kept: bool) -> None:
    assert fits(value, pa.field("x", pa.type_for_alias(kind))) is kept


def test_text_columns_keep_text_and_write_the_rest_as_json() -> None:
    assert to_array(["a", 1, None, [True]], pa.field("t", pa.string())).to_pylist() == ["a", "1", None, "[true]"]
    assert to_array(["a", 1, None], json_text_field("t")).to_pylist() == ['"a"', "1", None]


def test_a_widening_is_cast_and_anything_else_goes_through_values() -> None:
    array = pa.array([1, 2], pa.int8())
    assert cast_or_convert(array, list, pa.field("n", pa.int64())).to_pylist() == [1, 2]
    assert cast_or_convert(array, lambda: [1, 2], pa.field("n", pa.string())).to_pylist() == ["1", "2"]


def test_json_text_is_json_whatever_the_value() -> None:
    value = {
        "d": datetime.date(2026, 1, 2),
        "b": b"\xff",
        "n": Decimal("1.50"),
        "f": float("nan"),
        "l": [float("inf"), "é"],
    }
    assert json_text(value) == '{"d": "2026-01-02", "b": "/w==", "n": "1.50", "f": null, "l": [null, "é"]}'
    assert json.loads(json_text([datetime.timedelta(seconds=1)])) == ["0:00:01"]
