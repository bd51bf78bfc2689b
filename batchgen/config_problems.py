"""What is wrong with a job file, in its user's words: one line a problem, with place, key, reason and a way out."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from batchgen.config_values import describe
from batchgen.config_yaml import Entry, KeyPath, Place, Problem, key_name

JsonSchema = dict[str, Any]

_HINTS = {
    "sampling.temperature": "use 0 for greedy",
    "sampling.top_p": "use 1 to keep all tokens",
    "sampling.top_k": "use null to keep all tokens",
    "sampling.max_tokens": "use null for as many as the context leaves",
    "version": "this program reads version 1",
}

_PATTERNS = {
    "engine.device": "auto, cpu, cuda or cuda:N",
    "output.prefix": "letters, digits and _, with no digit first",
}

_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping of keys",
    "model_attributes_type": "a mapping of keys",
}

_BOUNDS = {
    "greater_than": (">", "gt"),
    "greater_than_equal": (">=", "ge"),
    "less_than": ("<", "lt"),
    "less_than_equal": ("<=", "le"),
}


def explain(error: ValidationError, places: Mapping[KeyPath, Entry], file: Place, schema: JsonSchema) -> list[Problem]:
    """One problem for each that pydantic found.

    `file` is the place of what has none, such as a missing section; `schema` is the job's JSON schema, where the
    valid names come from.
    """
    problems: list[Problem] = []
    missing: dict[str, Problem] = {}
    suggested: set[str] = set()
    for details in error.errors(include_url=False):
        path: KeyPath = details["loc"]
        place = _nearest(places, path, file)
        if details["type"] == "extra_forbidden":
            reason, names = _unknown_key(path, schema)
            suggested.update(names)
            problems.append(Problem(place.key, f"{key_name(path)}: {reason}"))
        elif details["type"] == "missing":
            reason = _missing(path, schema)
            missing[key_name(path)] = Problem(_nearest(places, path[:-1], file).key, f"{key_name(path)}: {reason}")
        else:
            name, reason = wrong_value(details)
            key = f"{name}: " if name else ""
            problems.append(Problem(place.key if name != key_name(path) else place.value, key + reason))
    # A misspelt key is one problem, not an unknown one and a missing one.
    return problems + [problem for key, problem in missing.items() if key not in suggested]


def _nearest(places: Mapping[KeyPath, Entry], path: KeyPath, file: Place) -> Entry:
    # What stands in an alias has no place of its own: the nearest one around it is named.
    around = (places[path[:end]] for end in range(len(path), 0, -1) if path[:end] in places)
    return next(around, Entry(file, file))


class WrongValue(NamedTuple):
    """What pydantic has against a value."""

    name: str
    """Of the key: `sampling.stop[0]`; empty for what is wrong with the whole."""
    reason: str


def wrong_value(details: ErrorDetails, section: KeyPath = ()) -> WrongValue:
    """Which value is wrong and why, in the user's words; `section` is where the checked model stands in a job."""
    path: KeyPath = details["loc"]
    # What pydantic calls a wrong key of a mapping; a value may have a key of this name, but is not its own key.
    if len(path) > 1 and path[-1] == "[key]" and str(details["input"]) == path[-2]:
        reason = _reason(details, "").removesuffix(f", got {describe(details['input'])}")
        return WrongValue(key_name(path[:-2]), f"every key {reason}, got {describe(details['input'])}")
    return WrongValue(key_name(path), _reason(details, key_name((*section, *path))))


def _reason(details: ErrorDetails, key: str) -> str:
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    hint = f"; {_HINTS[key]}" if key in _HINTS else ""
    if kind in _TYPES:
        return f"must be {_TYPES[kind]}, got {describe(value)}{_repair(kind, value)}"
    if kind in _BOUNDS:
        sign, name = _BOUNDS[kind]
        bound = context[name] if isinstance(context[name], int) else f"{context[name]:g}"
        return f"must be {sign} {bound}, got {describe(value)}{hint}"
    if kind == "literal_error":
        return _not_a_choice(str(context["expected"]), value) + hint
    if kind == "string_pattern_mismatch" and key in _PATTERNS:
        return f"must be {_PATTERNS[key]}, got {describe(value)}"
    if kind in {"string_too_short", "too_short"}:
        return "must not be empty"
    if kind == "value_error":
        return str(context["error"])
    return f"{details['msg']}, got {describe(value)}"


def _repair(kind: str, value: object) -> str:
    if kind in {"list_type", "tuple_type"} and isinstance(value, str):
        return f"; write [{json.dumps(value, ensure_ascii=False)}]"
    if kind == "string_type" and isinstance(value, (int, float)):
        return "; put it in quotes"
    if kind == "string_type" and isinstance(value, dict):
        return "; text that begins with { needs quotes"
    if not isinstance(value, str):
        return ""
    is_number = value.strip().lstrip("+-").replace(".", "", 1).isdigit()
    is_bool = kind == "bool_type" and value in {"true", "false"}
    return "; remove the quotes" if is_bool or (is_number and kind in {"int_type", "float_type"}) else ""


def _not_a_choice(expected: str, value: object) -> str:
    choices = expected.replace(" or ", ", ").replace("'", '"').replace("True", "true").replace("False", "false")
    words = [word.strip('"') for word in choices.split(", ")]
    listed = choices if len(words) == 1 else f"one of {choices}"
    close = difflib.get_close_matches(value, words, n=1) if isinstance(value, str) and value not in words else []
    suggestion = f'; did you mean "{close[0]}"?' if close else ""
    return f"must be {listed}, got {describe(value)}{suggestion}"


def _unknown_key(path: KeyPath, schema: JsonSchema) -> tuple[str, list[str]]:
    """The reason, and the full names of the keys it suggests."""
    parent, wrong = path[:-1], str(path[-1])
    known = list(_properties(schema, parent))
    elsewhere = [] if parent and len(parent) > 1 else _homes(wrong, schema, parent)
    if elsewhere:
        return f"no key of this section; it belongs to {_words(elsewhere)}", [f"{home}.{wrong}" for home in elsewhere]
    if close := difflib.get_close_matches(wrong, known, n=1):
        return f'unknown key; did you mean "{close[0]}"?', [key_name((*parent, close[0]))]
    if case := [name for name in known if name.lower() == wrong.lower()]:
        return f'unknown key; did you mean "{case[0]}"?', [key_name((*parent, case[0]))]
    return f"unknown key; known here: {', '.join(known)}", []


def _missing(path: KeyPath, schema: JsonSchema) -> str:
    if path == ("version",):
        return "missing; write `version: 1`"
    node = _properties(schema, path[:-1])[str(path[-1])]
    description = str(node.get("description") or _resolve(node, schema)["description"])
    return f"missing; {description[:1].lower()}{description[1:]}".rstrip(".")


def _homes(key: str, schema: JsonSchema, parent: KeyPath) -> list[str]:
    """The sections that have this key, where `parent` has not."""
    return [
        section
        for section in _properties(schema, ())
        if (section,) != parent and key in _properties(schema, (section,)) and key not in _properties(schema, parent)
    ]


def _properties(schema: JsonSchema, path: KeyPath) -> JsonSchema:
    """The `properties` of the JSON schema at a path; empty where it has none."""
    node = _resolve(schema, schema)
    for part in path:
        # A mapping of any names has one schema for all of them.
        named = node.get("properties", {}).get(part, node.get("additionalProperties"))
        child = node.get("items") if isinstance(part, int) else named
        node = _resolve(child if isinstance(child, dict) else {}, schema)
    properties: JsonSchema = node.get("properties", {})
    return properties


def _resolve(node: JsonSchema, schema: JsonSchema) -> JsonSchema:
    for choice in node.get("anyOf", ()):
        if choice.get("type") != "null":
            return _resolve(choice, schema)
    if "$ref" in node:
        definition: JsonSchema = schema["$defs"][node["$ref"].rsplit("/", 1)[1]]
        return definition
    return node


def _words(names: Iterable[str]) -> str:
    quoted = [json.dumps(name) for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"
