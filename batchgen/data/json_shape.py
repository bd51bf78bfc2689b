"""What a column of JSON values has held, and the Arrow type that holds all of it without loss.

The rule: one kind of value gives its type, integers beside floats give float64, and lists and structs are typed
where every element and field is. Anything else (two kinds in one column, an integer beyond int64, an integer that
float64 cannot hold beside floats, a struct without fields or with very many, very deep nesting) is kept as JSON text.
"""

from __future__ import annotations

from enum import IntFlag
from typing import Any

import pyarrow as pa

from batchgen.data.arrow_types import json_text_field

MAX_DEPTH = 16
"""Levels of lists and structs that a column type may have."""
MAX_FIELDS = 256
"""Fields of one struct; with more, its keys are data rather than names."""

_EXACT_FLOAT = 2**53
_INT64 = range(-(2**63), 2**63)


class Kind(IntFlag):
    """Kinds of values seen; null is none of them."""

    BOOLEAN = 1
    INTEGER = 2
    WIDE = 4
    """An integer beyond the whole numbers that float64 holds exactly."""
    HUGE = 8
    """An integer beyond int64."""
    FLOAT = 16
    TEXT = 32
    LIST = 64
    STRUCT = 128
    DEEP = 256
    """Nested deeper than MAX_DEPTH, or a struct with more than MAX_FIELDS fields."""


_PLAIN_TYPES: dict[int, pa.DataType] = {
    Kind.BOOLEAN: pa.bool_(),
    Kind.INTEGER: pa.int64(),
    Kind.INTEGER | Kind.WIDE: pa.int64(),
    Kind.FLOAT: pa.float64(),
    Kind.INTEGER | Kind.FLOAT: pa.float64(),
    Kind.TEXT: pa.string(),
}


class JsonShape:
    """The kinds of values that a column, its elements and its fields have held."""

    __slots__ = ("fields", "items", "kinds")

    def __init__(self) -> None:
        self.kinds = 0
        self.items: JsonShape | None = None
        self.fields: dict[str, JsonShape] = {}

    def observe(self, value: Any, depth: int = 0) -> None:
        """Take one value into account: str, int, float, bool, None, list or dict."""
        kind = type(value)
        if kind is str:
            self.kinds |= 32
        elif kind is float:
            self.kinds |= 16
        elif kind is bool:
            self.kinds |= 1
        elif kind is int:
            self.kinds |= _integer_kind(value)
        elif value is not None:
            self._observe_nested(value, depth)

    def _observe_nested(self, value: list[Any] | dict[str, Any], depth: int) -> None:
        self.kinds |= Kind.LIST if isinstance(value, list) else Kind.STRUCT
        if depth >= MAX_DEPTH or len(self.fields) > MAX_FIELDS:
            self.kinds |= Kind.DEEP
        elif isinstance(value, list):
            if self.items is None:
                self.items = JsonShape()
            for item in value:
                self.items.observe(item, depth + 1)
        else:
            for name, item in value.items():
                field = self.fields.get(name)
                if field is None:
                    field = self.fields[name] = JsonShape()
                field.observe(item, depth + 1)
            if len(self.fields) > MAX_FIELDS:
                self.kinds |= Kind.DEEP

    def merge(self, other: JsonShape) -> None:
        """Take into account all that `other` has seen."""
        self.kinds |= other.kinds
        if other.items is not None:
            self.items = self.items or JsonShape()
            self.items.merge(other.items)
        for name, field in other.fields.items():
            self.fields.setdefault(name, JsonShape()).merge(field)

    def arrow_type(self) -> pa.DataType | None:
        """The type that holds every value seen (null where there was none); None where only JSON text can."""
        if not self.kinds:
            return pa.null()
        if self.kinds == Kind.LIST:
            items = pa.null() if self.items is None else self.items.arrow_type()
            return None if items is None else pa.list_(items)
        if self.kinds == Kind.STRUCT:
            types = {name: field.arrow_type() for name, field in self.fields.items()}
            typed = [(name, kind) for name, kind in types.items() if kind is not None]
            return pa.struct(typed) if typed and len(typed) == len(types) <= MAX_FIELDS else None
        return _PLAIN_TYPES.get(self.kinds)

    def arrow_field(self, name: str) -> pa.Field[Any]:
        """A field of that name and type."""
        kind = self.arrow_type()
        return json_text_field(name) if kind is None else pa.field(name, kind)

    def to_json(self) -> list[Any]:
        """JSON values; `from_json` gives back an equal shape."""
        items = None if self.items is None else self.items.to_json()
        return [int(self.kinds), items, [[name, field.to_json()] for name, field in self.fields.items()]]

    @classmethod
    def from_json(cls, value: list[Any]) -> JsonShape:
        """Inverse of `to_json`."""
        shape = cls()
        shape.kinds = value[0]
        shape.items = None if value[1] is None else cls.from_json(value[1])
        shape.fields = {name: cls.from_json(field) for name, field in value[2]}
        return shape


def _integer_kind(value: int) -> int:
    if -_EXACT_FLOAT <= value <= _EXACT_FLOAT:
        return Kind.INTEGER
    return Kind.INTEGER | Kind.WIDE if value in _INT64 else Kind.INTEGER | Kind.HUGE
