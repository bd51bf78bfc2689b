"""JSON Schemas that a grammar can be made of: which keywords are supported, and what a schema comes to.

Draft 2020-12, of which an unsupported keyword is refused with its path (a JSON pointer into the schema). What is
declared here is what llguidance implements; it ignores keywords that it has never heard of, and this module does not.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

Node: TypeAlias = Mapping[str, Any] | bool

MAX_EXACT = 2**53 - 1
"""The largest whole number that every JSON reader holds exactly; grammars hold bounds as doubles."""
MAX_DEPTH = 64
MAX_NODES = 20_000

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")

_FOR_PEOPLE = ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly")
_FOR_TOOLS = ("$schema", "$id", "$comment", "$anchor", "contentMediaType", "contentEncoding")
ANNOTATIONS = frozenset((*_FOR_PEOPLE, *_FOR_TOOLS))
"""Keywords that say nothing of the values."""

_COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_ONE = ("items", "additionalProperties")
_MANY = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_OTHER = ("type", "enum", "const", "$ref", "required", "pattern", "format", "multipleOf")
KEYWORDS = frozenset((*_COUNTS, *_BOUNDS, *_ONE, *_MANY, *_NAMED, *_OTHER))
"""Keywords that a grammar enforces."""
_OTHERS = frozenset(
    {
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames"),
        *("dependentSchemas", "dependentRequired", "dependencies", "unevaluatedItems", "unevaluatedProperties"),
        *("additionalItems", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "$vocabulary"),
    }
)
"""Keywords of JSON Schema that no grammar is made of: written on purpose, not by mistake."""


class SchemaProblem(NamedTuple):
    """What is wrong with one place of a schema."""

    path: str
    """JSON pointer; empty for the schema itself."""
    what: str

    def __str__(self) -> str:
        return f"{self.path or '/'}: {self.what}"


def pointer(path: str, *keys: str | int) -> str:
    """The JSON pointer of something inside `path`."""
    return path + "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)


def children(node: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """The schemas right inside a schema, each with its path."""
    for key in _ONE:
        if key in node:
            yield pointer(path, key), node[key]
    for key in _MANY:
        if isinstance(node.get(key), list):
            yield from ((pointer(path, key, index), each) for index, each in enumerate(node[key]))
    for key in _NAMED:
        if isinstance(node.get(key), dict):
            yield from ((pointer(path, key, name), each) for name, each in node[key].items())


def resolve(root: Node, reference: str) -> Node | None:
    """The schema that a `$ref` inside `root` names; None where there is none."""
    node: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping) and key in node:
            node = node[key]
        elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        else:
            return None
    return node if isinstance(node, Mapping | bool) else None


def problems(root: Any) -> list[SchemaProblem]:
    """Everything in a schema that no grammar can be made of, as far as one can tell without making it."""
    found: list[SchemaProblem] = []
    todo: list[tuple[str, Any, int]] = [("", root, 0)]
    num_nodes = 0
    while todo:
        path, node, depth = todo.pop()
        num_nodes += 1
        if num_nodes > MAX_NODES:
            return [SchemaProblem("", f"has more than {MAX_NODES:,} schemas in it")]
        if depth > MAX_DEPTH:
            return [SchemaProblem(path, f"is nested deeper than {MAX_DEPTH} levels")]
        if isinstance(node, bool):
            continue
        if not isinstance(node, Mapping):
            found.append(SchemaProblem(path, f"must be a schema, which is a mapping, true or false, got {node!r}"))
            continue
        found += [SchemaProblem(pointer(path, key), what) for key, what in _wrong_keys(node, root)]
        todo += [(child_path, child, depth + 1) for child_path, child in children(node, path)][::-1]
    if not found and not _has_an_end(root, root, ("#",)):
        found.append(SchemaProblem("", "has no finite value: every value must hold another one of the same kind"))
    return found


def _has_an_end(node: Node, root: Node, opened: tuple[str, ...]) -> bool:
    """Whether a value can be finite; `opened` are the references that lead here, of which none need come again."""
    if isinstance(node, bool) or "enum" in node or "const" in node:
        return True
    reference = node.get("$ref")
    if reference is not None:
        target = resolve(root, reference)
        if reference in opened or (target is not None and not _has_an_end(target, root, (*opened, reference))):
            return False
    for key in ("anyOf", "oneOf"):
        if key in node and not any(_has_an_end(each, root, opened) for each in node[key]):
            return False
    needed = list(node.get("allOf", ()))
    if node.get("type") == "object":
        needed += [node["properties"][name] for name in node.get("required", ()) if name in node.get("properties", {})]
    elif node.get("type") == "array" and node.get("minItems", 0) > len(node.get("prefixItems", ())):
        needed.append(node.get("items", True))
    return all(_has_an_end(each, root, opened) for each in needed)


def _wrong_keys(node: Mapping[str, Any], root: Node) -> Iterator[tuple[str, str]]:
    for key, value in node.items():
        what = _wrong_value(key, value, root) if key in KEYWORDS else _unsupported(key)
        if what is not None:
            yield key, what


def _unsupported(key: str) -> str | None:
    if key in ANNOTATIONS:
        return None
    close = [] if key in _OTHERS else difflib.get_close_matches(key, KEYWORDS, n=1)
    way_out = f'; did you mean "{close[0]}"?' if close else "; docs/structured.md lists those that are"
    return f"this keyword is not supported{way_out}"


def _wrong_value(key: str, value: Any, root: Node) -> str | None:
    if key == "type":
        names = value if isinstance(value, list) else [value]
        if None in names:
            return 'must name its types as text: write "null" with quotes'
        if not names or any(name not in TYPES for name in names):
            return f"must be one or more of {', '.join(TYPES)}"
    elif key == "format":
        if value not in FORMATS:
            return f"format {value!r} is not supported; known are {', '.join(FORMATS)}"
    elif key == "$ref":
        if not isinstance(value, str) or not value.startswith("#"):
            return "must point into this schema, such as #/$defs/name; others are not fetched"
        if resolve(root, value) is None:
            return f"points to nothing: there is no {value}"
    elif key in ("enum", "const"):
        return _wrong_constant(key, value)
    elif key in _COUNTS:
        if type(value) is not int or value < 0:
            return "must be a whole number >= 0"
    elif key in (*_BOUNDS, "multipleOf"):
        return _wrong_number(value)
    elif key == "pattern":
        return None if isinstance(value, str) else "must be a regular expression"
    elif key == "required":
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            return "must be a list of names"
    elif key in _MANY:
        return None if isinstance(value, list) and value else "must be a list of schemas, at least one"
    elif key in _NAMED and not isinstance(value, dict):
        return "must be a mapping of schemas"
    return None


def _wrong_constant(key: str, value: Any) -> str | None:
    if key == "enum" and (not isinstance(value, list) or not value):
        return "must be a list of values, at least one"
    todo = [value]
    while todo:
        each = todo.pop()
        if isinstance(each, int | float) and (what := _wrong_number(each)) and not isinstance(each, bool):
            return what
        todo += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
    return None


def _wrong_number(value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "must be a number"
    if isinstance(value, int) and abs(value) > MAX_EXACT:
        return f"{value} is beyond ±{MAX_EXACT} (2 ** 53 - 1), so it cannot be held exactly; use a string"
    return None


def generated(schema: Node, *, bound_integers: bool) -> Node:
    """The schema that rows are generated by: stricter than the given one, so what it lets through is valid there too.

    An object that names its properties, and says nothing of others, has no others. Numbers without a bound are kept
    within ±(2 ** 53 - 1), in plain notation; `bound_integers` False leaves whole numbers alone.
    """
    made: Node = _generated(schema, bound_integers, is_part=False)
    return made


def _generated(node: Any, bound_integers: bool, is_part: bool) -> Any:
    if not isinstance(node, Mapping):
        return node
    # Schemas that are put together must leave room for each other's properties.
    combined = any(key in node for key in ("allOf", "anyOf", "oneOf", "$ref"))
    made: dict[str, Any] = {}
    for key, value in node.items():
        if key in ANNOTATIONS:
            continue
        if key in _ONE:
            made[key] = _generated(value, bound_integers, False)
        elif key in _MANY:
            parts = key == "allOf" or (combined and "properties" in node)
            made[key] = [_generated(each, bound_integers, parts) for each in value]
        elif key in _NAMED:
            # What is referred to may be a part of something larger.
            parts = key in ("$defs", "definitions") and _is_combined_with_refs(node)
            made[key] = {name: _generated(each, bound_integers, parts) for name, each in value.items()}
        else:
            made[key] = value
    is_whole = "properties" in node and not combined and not is_part
    if is_whole and not {"additionalProperties", "patternProperties"} & node.keys():
        made["additionalProperties"] = False
    made.update(_added_bounds(node, bound_integers))
    return made


def _is_combined_with_refs(root: Mapping[str, Any]) -> bool:
    """Whether some schema refers to another one and adds to it."""
    todo: list[Any] = [root]
    while todo:
        node = todo.pop()
        if not isinstance(node, Mapping):
            continue
        if "allOf" in node or ("$ref" in node and len(node.keys() - ANNOTATIONS - {"$defs", "definitions"}) > 1):
            return True
        todo += [child for _, child in children(node, "")]
    return False


def _added_bounds(node: Mapping[str, Any], bound_integers: bool) -> dict[str, int]:
    names = node.get("type")
    types = set(names if isinstance(names, list) else [names])
    if not types & ({"number", "integer"} if bound_integers else {"number"}) or "enum" in node or "const" in node:
        return {}
    added = {}
    if not {"minimum", "exclusiveMinimum"} & node.keys():
        added["minimum"] = -MAX_EXACT
    if not {"maximum", "exclusiveMaximum"} & node.keys():
        added["maximum"] = MAX_EXACT
    return added
