"""Arrow types of columns: one type for many files, and values into it without loss."""

from __future__ import annotations

import base64
import datetime
import json
import math
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from typing import Any, cast

import pyarrow as pa

JSON_TEXT = b"batchgen.json"
"""Metadata key of a field whose strings are JSON text."""

_CONVERSION_ERRORS = (pa.ArrowException, ValueError, TypeError, OverflowError)


def json_text_field(name: str) -> pa.Field[Any]:
    """A column whose values have no one type: each is kept as JSON text, null as null."""
    return pa.field(name, pa.string(), metadata={JSON_TEXT: b"true"})


def is_json_text(field: pa.Field[Any]) -> bool:
    """Whether a column holds its values as JSON text."""
    return field.metadata is not None and JSON_TEXT in field.metadata


def unify(schemas: Iterable[pa.Schema]) -> pa.Schema:
    """One schema with every column of all, in order of appearance, each with a type that holds the values of all."""
    fields: dict[str, pa.Field[Any]] = {}
    for schema in schemas:
        for field in schema:
            known = fields.get(field.name)
            fields[field.name] = field if known is None else _unify_fields(known, field)
    return pa.schema(list(fields.values()))


def _unify_fields(one: pa.Field[Any], other: pa.Field[Any]) -> pa.Field[Any]:
    if is_json_text(one) or is_json_text(other):
        return json_text_field(one.name)
    kind = unify_types(one.type, other.type)
    return json_text_field(one.name) if kind is None else pa.field(one.name, kind)


def unify_types(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The type that holds the values of both; None where only JSON text does."""
    if one.equals(other):
        return one
    for null, kind in ((one, other), (other, one)):
        if pa.types.is_null(null):
            return kind
    if pa.types.is_dictionary(one) or pa.types.is_dictionary(other):
        return unify_types(_undictionary(one), _undictionary(other))
    if isinstance(one, pa.StructType) and isinstance(other, pa.StructType):
        return _unify_structs(one, other)
    items_of_one, items_of_other = _list_items(one), _list_items(other)
    if items_of_one is not None and items_of_other is not None:
        items = unify_types(items_of_one, items_of_other)
        return None if items is None else pa.list_(items)
    if _is_text(one) and _is_text(other):
        return pa.large_string()
    return _unify_numbers(one, other)


def _undictionary(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if isinstance(kind, pa.DictionaryType) else kind


def _list_items(kind: pa.DataType) -> pa.DataType | None:
    return kind.value_type if isinstance(kind, (pa.ListType, pa.LargeListType, pa.FixedSizeListType)) else None


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _unify_structs(one: Iterable[pa.Field[Any]], other: Iterable[pa.Field[Any]]) -> pa.DataType | None:
    types: dict[str, pa.DataType] = {}
    for field in (*one, *other):
        kind = unify_types(types[field.name], field.type) if field.name in types else field.type
        if kind is None:
            return None
        types[field.name] = kind
    return pa.struct(list(types.items()))


def _unify_numbers(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    if pa.types.is_floating(one) and pa.types.is_floating(other):
        return max(one, other, key=lambda kind: kind.bit_width)
    if pa.types.is_timestamp(one) and pa.types.is_timestamp(other) and one.tz == other.tz:
        units = ("s", "ms", "us", "ns")
        return pa.timestamp(max(one.unit, other.unit, key=units.index), tz=one.tz)
    numbers = all(pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in (one, other))
    if not numbers:
        return None
    integers = [kind for kind in (one, other) if pa.types.is_integer(kind)]
    if len(integers) < 2:
        return pa.float64()
    # uint64 goes beyond int64; every other pair of widths and signs fits there.
    return None if any(pa.types.is_uint64(kind) for kind in integers) else pa.int64()


def holds_text(kind: pa.DataType) -> bool:
    """Whether there are strings in it, at any depth."""
    if isinstance(kind, pa.BaseExtensionType):
        return holds_text(kind.storage_type)
    if isinstance(kind, pa.DictionaryType):
        return holds_text(kind.value_type)
    return _is_text(kind) or any(holds_text(kind.field(index).type) for index in range(kind.num_fields))


def concrete(kind: pa.DataType) -> pa.DataType:
    """The type with every null type in it made a string: null merges with nothing, and most readers refuse it."""
    if pa.types.is_null(kind):
        return pa.string()
    if isinstance(kind, pa.ListType):
        return pa.list_(_concrete_field(kind.value_field))
    if isinstance(kind, pa.LargeListType):
        return pa.large_list(_concrete_field(kind.value_field))
    if isinstance(kind, pa.FixedSizeListType):
        return pa.list_(_concrete_field(kind.value_field), kind.list_size)
    if isinstance(kind, pa.MapType):
        return pa.map_(concrete(kind.key_type), concrete(kind.item_type), cast(Any, kind.keys_sorted))
    if isinstance(kind, pa.StructType):
        return pa.struct([_concrete_field(field) for field in kind])
    if isinstance(kind, pa.DictionaryType) and pa.types.is_null(kind.value_type):
        return pa.string()
    return kind


def _concrete_field(field: pa.Field[Any]) -> pa.Field[Any]:
    return field.with_type(concrete(field.type))


def to_array(values: Sequence[Any], field: pa.Field[Any]) -> pa.Array[Any]:
    """Python values as a column of the field's type; a value that does not fit is null.

    In a column of text whatever is no text becomes JSON text; in one of numbers or times, text is parsed.
    """
    try:
        return _to_array(values, field)
    except _CONVERSION_ERRORS:
        if len(values) == 1:
            null: pa.Array[Any] = pa.nulls(1, field.type)
            return null
    return pa.concat_arrays([to_array([value], field) for value in values])


def fits(value: Any, field: pa.Field[Any]) -> bool:
    """Whether `to_array` keeps the value."""
    try:
        _to_array([value], field)
    except _CONVERSION_ERRORS:
        return False
    return True


def cast_or_convert(array: pa.Array[Any], values: Callable[[], list[Any]], field: pa.Field[Any]) -> pa.Array[Any]:
    """A column in the field's type: cast where that only widens the type, else through its Python values."""
    if not is_json_text(field):
        if array.type.equals(field.type):
            return array
        widest = unify_types(array.type, field.type)
        if widest is not None and widest.equals(field.type):
            widened: pa.Array[Any] = array.cast(field.type)
            return widened
    return to_array(values(), field)


def _to_array(values: Sequence[Any], field: pa.Field[Any]) -> pa.Array[Any]:
    if is_json_text(field):
        values = [None if value is None else json_text(value) for value in values]
    elif _is_text(field.type):
        values = [value if value is None or isinstance(value, str) else json_text(value) for value in values]
    elif any(isinstance(value, str) for value in values) and _is_parsed(field.type):
        return pa.array([value if value is None else str(value) for value in values], pa.string()).cast(field.type)
    elif (pa.types.is_integer(field.type) or pa.types.is_temporal(field.type)) and any(
        _would_be_cut(value, field.type) for value in values
    ):
        raise pa.ArrowInvalid("a value has a part that is smaller than the type's unit")
    array = pa.array(values, type=field.type)
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def _would_be_cut(value: Any, kind: pa.DataType) -> bool:
    """Whether Arrow would drop a part of the value without a word."""
    if isinstance(value, (float, Decimal)):
        return math.isfinite(value) and value != int(value)
    if isinstance(value, datetime.datetime) and pa.types.is_date(kind):
        return value.time() != datetime.time()
    if isinstance(value, (datetime.datetime, datetime.time)):
        return value.microsecond % _MICROSECONDS.get(getattr(kind, "unit", ""), 1) != 0
    return False


_MICROSECONDS = {"s": 10**6, "ms": 10**3}


def _is_parsed(kind: pa.DataType) -> bool:
    return pa.types.is_temporal(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind) or kind == pa.bool_()


def json_text(value: Any) -> str:
    """A value as JSON; what JSON has no word for is text (dates in ISO 8601, bytes in base64), NaN is null."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_json_default)
    except ValueError:
        return json.dumps(_without_nan(value), ensure_ascii=False, allow_nan=False, default=_json_default)


def _json_default(value: Any) -> Any:
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, (Decimal, datetime.timedelta)):
        return str(value)
    return str(value)


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return value
