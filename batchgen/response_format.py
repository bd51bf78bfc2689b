"""What the text of every sample must be: a value of a JSON Schema, a match of a pattern, a choice, or of a grammar."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from batchgen.json_schema import problems

MAX_GRAMMAR_BYTES = 2 * 2**20
_MOST_PROBLEMS = 8
_MEMBERS = {
    "json_schema": ("schema",),
    "regex": ("regex",),
    "choice": ("choice",),
    "grammar": ("grammar",),
    "select": ("by", "of"),
}


def _schema_text(value: Any) -> Any:
    """A schema as JSON text, which keeps the order of its properties wherever it is stored."""
    if isinstance(value, str):
        if not value.lstrip().startswith("{"):
            raise ValueError(f"must be a schema, got {value!r}; a path goes into a job file")
        try:
            value = json.loads(value, object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON Schema, which is a mapping, got {type(value).__name__}")
    found = problems(value)
    if found:
        more = f"; and {len(found) - _MOST_PROBLEMS} more" if len(found) > _MOST_PROBLEMS else ""
        raise ValueError("; ".join(str(each) for each in found[:_MOST_PROBLEMS]) + more)
    text = json.dumps(value, ensure_ascii=False)
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise ValueError(f"is larger than {MAX_GRAMMAR_BYTES >> 20} MiB")
    return text


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands twice")
    return values


class ResponseFormat(BaseModel):
    """What every sample must be; the samples are drawn from the tokens that can still lead there."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    type: Annotated[
        Literal["json_schema", "regex", "choice", "grammar", "select"],
        Field(description="Which of the keys below says it; select: `by` and `of`, for each row by itself."),
    ]
    schema_: Annotated[
        str | None,
        BeforeValidator(lambda value: None if value is None else _schema_text(value)),
        WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}]}),
        Field(
            alias="schema",
            description="A JSON Schema, or the path of a JSON file with one, relative to the job file.",
            examples=["person.schema.json"],
        ),
    ] = None
    regex: Annotated[
        str | None,
        Field(min_length=1, max_length=MAX_GRAMMAR_BYTES, description="A regular expression for the whole text."),
    ] = None
    choice: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...] | None,
        Field(min_length=1, max_length=100_000, description="The texts of which each sample is one."),
    ] = None
    grammar: Annotated[
        str | None,
        Field(min_length=1, max_length=MAX_GRAMMAR_BYTES, description="A context-free grammar in llguidance's form."),
    ] = None
    by: Annotated[
        str | None,
        Field(min_length=1, description="A template whose text names one of `of`.", examples=["{{ kind }}"]),
    ] = None
    of: Annotated[
        dict[str, ResponseFormat] | None,
        Field(min_length=1, max_length=100, description="Response formats by name, of which each row has one."),
    ] = None
    integers: Annotated[
        Literal["int64", "string"],
        Field(
            description="int64: whole numbers without bounds are kept within ±(2 ** 53 - 1); string: they may have any "
            "number of digits, and their columns hold text."
        ),
    ] = "int64"

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        wanted = _MEMBERS[self.type]
        given: dict[str, object] = {"schema": self.schema_, "regex": self.regex, "choice": self.choice}
        given |= {"grammar": self.grammar, "by": self.by, "of": self.of}
        missing = [name for name in wanted if given[name] is None]
        if missing:
            raise ValueError(f"type {self.type} needs the key {missing[0]}")
        extra = [name for name, value in given.items() if value is not None and name not in wanted]
        if extra:
            raise ValueError(f"{extra[0]} does not go with type {self.type}; leave it out")
        if self.integers != "int64" and self.type != "json_schema":
            raise ValueError("integers goes with type json_schema; leave it out")
        if any(form.type == "select" for form in (self.of or {}).values()):
            raise ValueError("of holds another select; name its formats here")
        if self.choice is not None and len(set(self.choice)) < len(self.choice):
            raise ValueError("choice holds a text twice")
        return self

    @property
    def forms(self) -> dict[str, ResponseFormat]:
        """The formats by the names of the keys that hold them: itself, or those that rows select from."""
        here = "sampling.response_format"
        return {here: self} if self.of is None else {f"{here}.of.{name}": form for name, form in self.of.items()}

    def __hash__(self) -> int:
        return hash((self.type, self.schema_, self.regex, self.choice, self.grammar, self.by, self.integers))

    @property
    def json_schema(self) -> Any:
        """The schema as it was given; None for other types."""
        return None if self.schema_ is None else json.loads(self.schema_)
