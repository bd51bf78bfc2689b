"""Arrow columns as the plain Python values that prompts are made from."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pyarrow as pa


def to_python(array: pa.Array[Any], errors: Collection[int]) -> list[Any]:
    """One value per row, None where null or where `errors` has the row.

    Times are cut to microseconds (what Python's hold), and dictionaries, views and extension types give their values.
    """
    array = without_rows(array, errors)
    plain = _plain_type(array.type)
    if not plain.equals(array.type):
        array = _storage(array).cast(plain, safe=False)
    return array.to_pylist(maps_as_pydicts="lossy")


def without_rows(array: pa.Array[Any], rows: Collection[int]) -> pa.Array[Any]:
    """The array with null in these rows."""
    if not rows:
        return array
    try:
        return array.take(pa.array([None if index in rows else index for index in range(len(array))], pa.int64()))
    except pa.ArrowNotImplementedError:  # Lists of views, for one.
        null: pa.Array[Any] = pa.nulls(1, array.type)
        return pa.concat_arrays([null if index in rows else array.slice(index, 1) for index in range(len(array))])


def value_bytes(array: pa.Array[Any]) -> int:
    """Bytes of the values alone: what a dictionary or a buffer of views holds beside them is not counted."""
    plain = _plain_type(array.type)
    if plain.equals(array.type):
        return array.nbytes
    return _storage(array).cast(plain, safe=False).nbytes


def invalid_text_rows(array: pa.Array[Any]) -> list[int]:
    """Rows whose strings, at any depth, are not UTF-8: the formats do not promise that they are.

    ArrowInvalid where the array itself is wrong, so that reading a value may reach beyond its memory.
    """
    try:
        array.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise
        return [index for index in range(len(array)) if not _is_valid(array.slice(index, 1))]
    return []


def _is_valid(array: pa.Array[Any]) -> bool:
    try:
        # A copy, since validation looks at a whole nested child, not at the slice of it.
        pa.concat_arrays([array, array.slice(0, 0)]).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _storage(array: pa.Array[Any]) -> pa.Array[Any]:
    return array.storage if isinstance(array, pa.ExtensionArray) else array


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if isinstance(kind, pa.BaseExtensionType):
        return _plain_type(kind.storage_type)
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", tz=kind.tz)
    if pa.types.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    if pa.types.is_time64(kind) and kind.unit == "ns":
        return pa.time64("us")
    if isinstance(kind, pa.DictionaryType):
        return _plain_type(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    if isinstance(kind, pa.StructType):
        return pa.struct([field.with_type(_plain_type(field.type)) for field in kind])
    if isinstance(kind, pa.ListType):
        return pa.list_(kind.value_field.with_type(_plain_type(kind.value_type)))
    if isinstance(kind, pa.LargeListType):
        return pa.large_list(kind.value_field.with_type(_plain_type(kind.value_type)))
    if isinstance(kind, pa.FixedSizeListType):
        return pa.list_(kind.value_field.with_type(_plain_type(kind.value_type)), kind.list_size)
    if isinstance(kind, pa.MapType):
        return pa.map_(_plain_type(kind.key_type), _plain_type(kind.item_type))
    return kind
