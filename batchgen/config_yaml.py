"""YAML 1.2 with a place for every key: what the job file and `--set` values are read with.

PyYAML scans and parses; its events become plain data here, since its own constructors read YAML 1.1 (`no` is a
boolean and `1e-4` a string there), keep the last of two equal keys, and forget where things stood.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml
from yaml.reader import ReaderError

KeyPath = tuple[str | int, ...]

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_VALUES = 10_000
"""Values in one document, aliases counted in full: a file of nested aliases must not become gigabytes."""

_TEXT_TAGS = {None, "!", "tag:yaml.org,2002:str"}
_MAPPING_TAGS = {None, "!", "tag:yaml.org,2002:map"}
_SEQUENCE_TAGS = {None, "!", "tag:yaml.org,2002:seq"}

# The core schema of YAML 1.2.2, section 10.3.2.
_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]{1,100}")
_OCTAL = re.compile(r"0o[0-7]{1,100}")
_HEX = re.compile(r"0x[0-9a-fA-F]{1,100}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INF = re.compile(r"[-+]?\.(inf|Inf|INF)")
_NAN = re.compile(r"\.(nan|NaN|NAN)")


class Place(NamedTuple):
    """A place to send the user to; places sort in the order of the file."""

    line: int
    """From 1; 0 for the file as a whole."""
    column: int
    text: str
    """What a problem's line begins with: `job.yaml:7:3: `."""


class Entry(NamedTuple):
    """Where a key stands and where its value does; an item of a list has one place."""

    key: Place
    value: Place


class Problem(NamedTuple):
    """One thing that is wrong; its text is a whole line for the user."""

    place: Place
    what: str

    def __str__(self) -> str:
        return self.place.text + self.what


@dataclass
class YamlDocument:
    """Plain data (dict with text keys, list, str, int, float, bool, None) and the place of each value in it."""

    data: Any = None
    places: dict[KeyPath, Entry] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    """Where there are any, `data` may lack what they speak of."""


class _RefusedError(Exception):
    """Nothing after this point can be read."""

    def __init__(self, mark: Any, reason: str) -> None:
        super().__init__(reason)
        self.mark = mark


def key_name(path: KeyPath) -> str:
    """`("prompt", "messages", 0, "role")` -> `prompt.messages[0].role`."""
    name = ""
    for part in path:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    return name


def read_yaml(text: str, name: str) -> YamlDocument:
    """Read one document; problems are collected, never raised. `name` begins their lines."""
    return _Composer(text, name).compose()


def resolve_plain(text: str) -> str | int | float | bool | None:
    """The value of an unquoted scalar by the core schema of YAML 1.2."""
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if _INT.fullmatch(text):
        return int(text)
    if _OCTAL.fullmatch(text) or _HEX.fullmatch(text):
        return int(text, base=0)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _INF.fullmatch(text) or _NAN.fullmatch(text):
        return float(text.lower().replace(".", "", 1))
    return text


class _Composer:
    def __init__(self, text: str, name: str) -> None:
        self.text = text
        self.name = name
        self.document = YamlDocument()
        self.events: Iterator[Any] = iter(())
        self.anchors: dict[str, tuple[Any, int]] = {}
        self.open_anchors: set[str] = set()
        self.num_values = 0

    def compose(self) -> YamlDocument:
        try:
            self.events = yaml.parse(self.text, Loader=yaml.SafeLoader)
            self._compose_stream()
        except _RefusedError as refused:
            self._problem(refused.mark, str(refused))
        except yaml.MarkedYAMLError as error:
            is_at_end = "end of stream" in (error.problem or "")
            mark = error.context_mark if is_at_end and error.context_mark else error.problem_mark
            self._problem(mark, _syntax_reason(error))
        except ReaderError as error:
            before = self.text[: error.position]
            place = self._place_at(before.count("\n") + 1, error.position - before.rfind("\n"))
            reason = (
                f"the character U+{ord(self.text[error.position]):04X} may not stand in YAML; write it as an escape"
            )
            self.document.problems.append(Problem(place, reason))
        return self.document

    def _compose_stream(self) -> None:
        next(self.events)  # the start of the stream
        if isinstance(next(self.events), yaml.StreamEndEvent):
            return
        self.document.data = self._compose_value(next(self.events), ())
        next(self.events)  # the end of the document
        if not isinstance(second := next(self.events), yaml.StreamEndEvent):
            raise _RefusedError(
                second.start_mark, "a second document begins here; a job file holds one, so remove the `---`"
            )

    def _compose_value(self, event: Any, path: KeyPath) -> Any:
        self._count(event, 1)
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event)
        anchor, before = event.anchor, self.num_values
        if anchor is not None:
            self.open_anchors.add(anchor)
        value = self._compose_node(event, path)
        if anchor is not None:
            self.open_anchors.discard(anchor)
            self.anchors[anchor] = (value, self.num_values - before)
        return value

    def _compose_node(self, event: Any, path: KeyPath) -> Any:
        if len(path) > MAX_DEPTH:
            raise _RefusedError(event.start_mark, f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event)
        if isinstance(event, yaml.MappingStartEvent):
            self._check_tag(event, _MAPPING_TAGS)
            return self._mapping(path)
        self._check_tag(event, _SEQUENCE_TAGS)
        return self._sequence(path)

    def _mapping(self, path: KeyPath) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        lines: dict[str, int] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key = self._key(event)
            child = (*path, key)
            value_event = next(self.events)
            if key in mapping:
                reason = f"given twice, first in line {lines[key]}; keep one"
                self._problem(event.start_mark, f"{key_name(child)}: {reason}")
                self._compose_value(value_event, child)
                continue
            lines[key] = event.start_mark.line + 1
            self.document.places[child] = Entry(self._place(event.start_mark), self._place(value_event.start_mark))
            mapping[key] = self._compose_value(value_event, child)
        return mapping

    def _key(self, event: Any) -> str:
        if not isinstance(event, yaml.ScalarEvent):
            raise _RefusedError(event.start_mark, "a key must be a word; text that begins with {, [ or * needs quotes")
        self._check_tag(event, _TEXT_TAGS)
        if event.value == "<<" and event.style is None:
            raise _RefusedError(event.start_mark, "merge keys (<<) are not read; write the keys out")
        return str(event.value)

    def _sequence(self, path: KeyPath) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            child = (*path, len(items))
            place = self._place(event.start_mark)
            self.document.places[child] = Entry(place, place)
            items.append(self._compose_value(event, child))
        return items

    def _scalar(self, event: Any) -> Any:
        self._check_tag(event, _TEXT_TAGS)
        if any("\ud800" <= char <= "\udfff" for char in event.value):
            self._problem(event.start_mark, "half of a surrogate pair is no character; write the character itself")
            return "\ufffd"
        is_plain = event.style is None and event.tag is None
        return resolve_plain(event.value) if is_plain else event.value

    def _alias(self, event: Any) -> Any:
        if event.anchor in self.open_anchors:
            raise _RefusedError(event.start_mark, f"*{event.anchor} refers to what it stands in")
        if event.anchor not in self.anchors:
            raise _RefusedError(event.start_mark, f"*{event.anchor} has no anchor &{event.anchor} before it")
        value, num_values = self.anchors[event.anchor]
        self._count(event, num_values)
        return value

    def _count(self, event: Any, num_values: int) -> None:
        self.num_values += num_values
        if self.num_values > MAX_VALUES:
            raise _RefusedError(event.start_mark, f"more than {MAX_VALUES} values (aliases count in full)")

    def _check_tag(self, event: Any, allowed: set[str | None]) -> None:
        if event.tag not in allowed:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            raise _RefusedError(event.start_mark, f"the tag {tag} is not read; remove it")

    def _place(self, mark: Any) -> Place:
        return self._place_at(mark.line + 1, mark.column + 1) if mark else Place(0, 0, f"{self.name}: ")

    def _place_at(self, line: int, column: int) -> Place:
        return Place(line, column, f"{self.name}:{line}:{column}: ")

    def _problem(self, mark: Any, reason: str) -> None:
        self.document.problems.append(Problem(self._place(mark), reason))


def _syntax_reason(error: yaml.MarkedYAMLError) -> str:
    problem = (error.problem or "not valid YAML").replace("\n", " ")
    if r"'\t'" in problem:
        return "a tab cannot indent or begin a value in YAML; use spaces"
    if "mapping values are not allowed here" in problem:
        return "not valid YAML: a colon where no key can stand; put text that contains `: ` in quotes"
    if "could not find expected ':'" in problem:
        return "not valid YAML: a key without a colon, or a wrong indentation, just above"
    context = f"{error.context}, " if error.context else ""
    return f"not valid YAML: {context}{problem}"
