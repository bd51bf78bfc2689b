"""Columns that a JSON Schema declares: their Arrow types, known before the first row, and the values of a text.

A value that no one type holds (any JSON, a union of unlike types, an open object, a recursion) is JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from batchgen.data.arrow_types import json_text
from batchgen.json_schema import ANNOTATIONS, Node, generated, resolve
from batchgen.response_format import ResponseFormat

PARSED = "parsed"
"""Name of the one column with `output.parse: struct`, and of a value that is no object."""

_MOST_DIGITS = 4000
_MOST_KINDS = 10_000
"""References can make a small schema a very large type; what comes after so many parts of it is JSON text."""
ENUM = pa.dictionary(pa.int32(), pa.string())


class Kind(NamedTuple):
    """The type of a value, and how the value of JSON becomes one of Arrow; null stays null."""

    type: pa.DataType
    convert: Callable[[Any], Any]


class TypedColumn(NamedTuple):
    """One column that is filled from the value of a sample's text."""

    name: str
    type: pa.DataType
    of: Callable[[Any], Any]
    """The cell of a whole value."""


JSON_TEXT = Kind(pa.string(), json_text)
_STRING = Kind(pa.string(), str)
_FLOAT = Kind(pa.float64(), float)
_INT64 = Kind(pa.int64(), int)
_BOOL = Kind(pa.bool_(), bool)
_ENUM = Kind(ENUM, str)


def typed_columns(form: ResponseFormat | None, parse: Literal["columns", "struct", "text"]) -> tuple[TypedColumn, ...]:
    """The columns beside the text; none where there is no schema, or the job wants none."""
    forms = [] if form is None else list(form.forms.values())
    if parse == "text" or not forms or any(each.type != "json_schema" for each in forms):
        return ()
    properties = [_properties(each) for each in forms]
    if parse == "columns" and all(properties):
        names = list(dict.fromkeys(name for each in properties for name in each))
        kinds = {name: _common(each[name] for each in properties if name in each) for name in names}
        return tuple(TypedColumn(name, kind.type, _member(name, kind)) for name, kind in kinds.items())
    kind = _common(_whole(each) for each in forms)
    return (TypedColumn(PARSED, kind.type, _nullable(kind)),)


def _common(kinds: Iterable[Kind]) -> Kind:
    """The kind of a column that several response formats fill: JSON text where theirs differ."""
    each = list(kinds)
    if all(kind in (_STRING, _ENUM) for kind in each):
        return each[0] if all(kind is each[0] for kind in each) else _STRING
    is_same = all(kind.type == each[0].type and not pa.types.is_string(kind.type) for kind in each)
    return each[0] if is_same else JSON_TEXT


def _properties(form: ResponseFormat) -> dict[str, Kind]:
    kinds = _kinds(form)
    return kinds.properties(kinds.root)


def _whole(form: ResponseFormat) -> Kind:
    kinds = _kinds(form)
    return kinds.of(kinds.root)


def _kinds(form: ResponseFormat) -> _Kinds:
    return _Kinds(generated(form.json_schema, bound_integers=form.integers == "int64"), form.integers)


def _nullable(kind: Kind) -> Callable[[Any], Any]:
    return lambda value: None if value is None else kind.convert(value)


def _member(name: str, kind: Kind) -> Callable[[Any], Any]:
    convert = _nullable(kind)
    return lambda value: convert(value.get(name)) if isinstance(value, dict) else None


def value_of(text: str) -> Any:
    """The value of a text that a schema's grammar let through whole."""
    # Python reads no number of more digits; in a column of text it stands as it was written.
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) <= _MOST_DIGITS else digits)


class _Kinds:
    """The kinds of the schemas inside one schema."""

    def __init__(self, root: Node, integers: Literal["int64", "string"]) -> None:
        self.root = root
        self._integer = _INT64 if integers == "int64" else _STRING
        self._open = ["#"]
        """References that are being followed: one that comes again is a recursion."""
        self._num_kinds = 0

    def properties(self, node: Node) -> dict[str, Kind]:
        """Name -> kind of an object that names its properties; empty for every other schema."""
        if isinstance(node, bool):
            return {}
        if node.keys() - ANNOTATIONS - {"$defs", "definitions"} == {"$ref"}:
            target = resolve(self.root, node["$ref"])
            return {} if target is None or target is node or target == node else self.properties(target)
        if node.get("type") != "object" or not isinstance(node.get("properties"), dict) or _is_combined(node):
            return {}
        return {name: self.of(each) for name, each in node["properties"].items()}

    def of(self, node: Any) -> Kind:
        """The narrowest kind that holds every value of a schema."""
        self._num_kinds += 1
        if not isinstance(node, Mapping) or self._num_kinds > _MOST_KINDS:
            return JSON_TEXT
        if "const" in node or "enum" in node:
            return self._of_values([node["const"]] if "const" in node else node["enum"])
        if _is_combined(node):
            return self._of_combination(node)
        names = node.get("type", [])
        types = [name for name in (names if isinstance(names, list) else [names]) if name != "null"]
        if not types:
            # Null alone is a column of text without values: a null type merges with nothing.
            return _STRING if names in ("null", ["null"]) else JSON_TEXT
        return self._unified([self._of_type(name, node) for name in types])

    def _of_type(self, name: str, node: Mapping[str, Any]) -> Kind:
        if name == "array":
            return self._of_array(node)
        if name == "object":
            return self._of_object(node)
        return {"string": _STRING, "integer": self._integer, "number": _FLOAT, "boolean": _BOOL}.get(name, JSON_TEXT)

    def _of_array(self, node: Mapping[str, Any]) -> Kind:
        items = node.get("items", True)
        each = [self.of(item) for item in node.get("prefixItems", [])]
        if items is not False:
            each.append(self.of(items))
        kind = self._unified(each) if each else JSON_TEXT
        if kind is JSON_TEXT and not (isinstance(items, Mapping) and "prefixItems" not in node):
            return JSON_TEXT
        convert = _nullable(kind)
        return Kind(pa.list_(kind.type), lambda values: [convert(value) for value in values])

    def _of_object(self, node: Mapping[str, Any]) -> Kind:
        is_closed = node.get("additionalProperties") is False and not node.get("patternProperties")
        if not is_closed or not node.get("properties"):
            return JSON_TEXT
        members = {name: self.of(each) for name, each in node["properties"].items()}
        cells = {name: _member(name, kind) for name, kind in members.items()}
        struct = pa.struct([pa.field(name, kind.type) for name, kind in members.items()])
        return Kind(struct, lambda value: {name: cell(value) for name, cell in cells.items()})

    def _of_values(self, values: list[Any]) -> Kind:
        types = {type(value) for value in values if value is not None}
        if not types:
            return _STRING
        if types == {str}:
            return _ENUM
        if types == {bool}:
            return _BOOL
        if types == {int}:
            return self._integer
        return _FLOAT if types <= {int, float} else JSON_TEXT

    def _of_combination(self, node: Mapping[str, Any]) -> Kind:
        if "$ref" in node:
            return self._of_reference(node)
        if "allOf" in node:
            # What holds the values of one part holds those of all of them together, but for properties of the others.
            kinds = [self.of(part) for part in node["allOf"]]
            scalars = [kind for kind in kinds if kind is not JSON_TEXT and not pa.types.is_nested(kind.type)]
            return scalars[0] if scalars else JSON_TEXT
        kinds = [self.of(part) for key in ("anyOf", "oneOf") for part in node.get(key, []) if not _is_null(part)]
        return self._unified(kinds) if kinds and "properties" not in node else JSON_TEXT

    def _of_reference(self, node: Mapping[str, Any]) -> Kind:
        reference = node["$ref"]
        target = resolve(self.root, reference)
        others = node.keys() - ANNOTATIONS - {"$ref", "$defs", "definitions"}
        if reference in self._open or target is None:
            return JSON_TEXT
        self._open.append(reference)
        kind = self.of(target)
        self._open.pop()
        return JSON_TEXT if others and pa.types.is_nested(kind.type) else kind

    def _unified(self, kinds: Iterable[Kind]) -> Kind:
        each = list(kinds)
        first = each[0]
        if all(kind is first or (kind.type == first.type and not pa.types.is_string(kind.type)) for kind in each):
            return first
        if all(kind in (_INT64, _FLOAT) for kind in each):
            return _FLOAT
        return _STRING if all(kind in (_STRING, _ENUM) for kind in each) and self._integer is _INT64 else JSON_TEXT


def _is_combined(node: Mapping[str, Any]) -> bool:
    return any(key in node for key in ("$ref", "allOf", "anyOf", "oneOf"))


def _is_null(node: Any) -> bool:
    return isinstance(node, Mapping) and (node.get("type") in ("null", ["null"]) or node.get("const", 0) is None)
