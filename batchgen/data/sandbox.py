"""Jinja environments in which the job's and the model's templates run: no access to Python, nothing changed."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from batchgen.data.arrow_types import json_text
from batchgen.data.input_rows import RowFailure
from batchgen.errors import JobError

MAX_OUTPUT_CHARACTERS = 4 * 2**20
"""Characters that one template may write for one row."""

_TEMPLATE_FILE = "<template>"
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks what an assistant said, for training; here it only groups."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Scope:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _PrivateNamespace(Namespace):
    """Jinja's namespace, without names that begin with an underscore."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.TemplateRuntimeError(f"a namespace cannot hold {name!r}: it begins with an underscore")
        super().__setitem__(name, value)


class _RowEnvironment(ImmutableSandboxedEnvironment):
    """Where templates of the job run."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """A field of a struct comes before a method of Python's dict: `{{ record.items }}` is the field."""
        if isinstance(obj, dict) and attribute in obj:
            return obj[attribute]
        return super().getattr(obj, attribute)


def chat_environment(now: datetime.datetime) -> jinja2.Environment:
    """What chat templates are written for: the settings, globals and filters that transformers gives them."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    return _equip(environment, now)


def row_environment(now: datetime.datetime) -> jinja2.Environment:
    """For the job's own templates: text as it is written, nothing undefined, no null printed as the word None."""
    environment = _RowEnvironment(
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        finalize=_printed,
        extensions=["jinja2.ext.loopcontrols"],
    )
    return _equip(environment, now)


def _equip(environment: jinja2.Environment, now: datetime.datetime) -> jinja2.Environment:
    environment.globals.update(raise_exception=_raise_exception, strftime_now=now.strftime, namespace=_PrivateNamespace)
    environment.filters["tojson"] = _to_json
    # What draws at random would make another prompt of the row when a run goes on.
    del environment.filters["random"], environment.globals["lipsum"]
    return environment


class NullPrinted(jinja2.TemplateRuntimeError):
    """A template of the job prints a value that is null."""


@jinja2.pass_context
def _printed(context: Context, value: Any) -> Any:
    if value is None:
        raise NullPrinted("prints a value that is null; use {{ name or '' }} or {% if name %}")
    if isinstance(value, (list, tuple, dict)):
        return json_text(value)
    if isinstance(value, jinja2.Undefined):
        return value  # It raises when it is printed, and says its name.
    if isinstance(value, bytes) or callable(value):
        kind = "bytes" if isinstance(value, bytes) else "a function"
        raise jinja2.TemplateRuntimeError(f"prints {kind}, which is no text")
    return value


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def compile_template(environment: jinja2.Environment, source: str, key: str) -> jinja2.Template:
    """Compile; JobError that names `key` and the line where the template is wrong."""
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise JobError(f"{key}: line {error.lineno} of the template: {error.message}") from error
    except Exception as error:  # Jinja computes constants while it compiles, and they may raise anything.
        raise JobError(f"{key}: the template cannot be compiled: {describe_error(error)}") from error


def render(template: jinja2.Template, context: dict[str, Any], limit: int = MAX_OUTPUT_CHARACTERS) -> str:
    """The text that a template writes; RowFailure `template_error` for whatever goes wrong, with the line."""
    try:
        return "".join(_limited(template.generate(context), limit))
    except RowFailure:
        raise
    except Exception as error:  # The row boundary: an expression of a template may raise anything.
        line = _line_of(error)
        where = f"line {line} of the template: " if line else ""
        raise RowFailure("template_error", where + describe_error(error)) from error


def _limited(pieces: Iterator[str], limit: int) -> Iterator[str]:
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > limit:
            raise RowFailure("template_error", f"the template writes more than {limit} characters")
        yield piece


def describe_error(error: Exception) -> str:
    """What a template's expression raised, without addresses, so that it is the same in every run."""
    if isinstance(error, jinja2.TemplateError):
        return _ADDRESS.sub("", error.message or "the template refuses this row")
    if isinstance(error, MemoryError):
        return "needs too much memory"
    return _ADDRESS.sub("", f"{type(error).__name__}: {error}")


def _line_of(error: BaseException) -> int | None:
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _TEMPLATE_FILE:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


Renderer = Callable[[dict[str, Any]], str]
"""Writes the whole prompt of a row from its values."""
