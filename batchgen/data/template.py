"""Rows to prompts: the job's templates over the columns, and the model's chat template around them."""

from __future__ import annotations

import datetime
from collections.abc import Collection
from typing import Any

import jinja2
from jinja2 import meta, nodes

from batchgen.config import PromptConfig
from batchgen.data.chat_template import ChatMessage, ChatTemplate
from batchgen.data.control_tokens import ControlTokens
from batchgen.data.input_rows import RowFailure
from batchgen.data.reader import near_names
from batchgen.data.sandbox import NullPrinted, compile_template, render, row_environment
from batchgen.errors import JobError
from batchgen.tokenizer import RenderedPrompt

__all__ = ["ChatTemplate", "PromptTemplate", "RowFailure"]

ROW = "row"
"""In templates, the row as a mapping, for columns whose names are no identifiers: `{{ row["a b"] }}`."""


class PromptTemplate:
    """What turns the values of a row into its prompt."""

    def __init__(
        self,
        config: PromptConfig,
        chat_template: ChatTemplate | None,
        *,
        control_tokens: Collection[str] = (),
        now: datetime.datetime | None = None,
    ) -> None:
        """Compile; JobError where a template is wrong, where the model has no chat template or it takes no such roles.

        `control_tokens` are the spellings that row data must not turn into control tokens; `now` is what
        `strftime_now` sees, the start of the job.
        """
        self._config = config
        self._chat_template = chat_template
        self._control_tokens = ControlTokens(() if config.allow_special_tokens else tuple(control_tokens))
        self._environment = row_environment(now or datetime.datetime.now())
        self._template: jinja2.Template | None = None
        self._messages: list[tuple[str, jinja2.Template]] = []
        self._function_names: set[str] = set()
        self._names: set[str] = set() if config.column is None else {config.column}
        if config.template is not None:
            self._template = self._compile(config.template, "prompt.template")
        for index, message in enumerate(config.messages or []):
            self._messages.append((message.role, self._compile(message.content, f"prompt.messages[{index}].content")))
        if self._messages:
            self._probe_chat()

    def _compile(self, source: str, key: str) -> jinja2.Template:
        template = compile_template(self._environment, source, key)
        tree = self._environment.parse(source)
        self._names |= meta.find_undeclared_variables(tree)
        # A column named as one of Jinja's functions (`range`) comes before it.
        self._function_names |= {name.name for name in tree.find_all(nodes.Name)} & self._environment.globals.keys()
        return template

    def _probe_chat(self) -> None:
        if self._chat_template is None:
            raise JobError("prompt.messages: the model has no chat template; use prompt.template, or set chat_template")
        self._chat_template.probe([role for role, _ in self._messages])

    def columns(self, available: Collection[str]) -> frozenset[str]:
        """The columns that the prompt reads; JobError, with near names, for one that is not `available`.

        An empty `available` means that nothing is known of the columns, and nothing is refused.
        """
        names = self._names | self._function_names.intersection(available)
        if ROW in names and ROW not in available:
            return frozenset(available)
        for name in sorted(names.difference(available)) if available else ():
            raise JobError(f"prompt: no column {name!r} in the input{near_names(name, available)}")
        return frozenset(names)

    def render(self, values: dict[str, Any]) -> RenderedPrompt:
        """The prompt of a row; RowFailure where the row has none."""
        text, literals = self._control_tokens.render(self._text, values)
        if not text:
            raise RowFailure("empty_prompt", "the prompt is empty")
        return RenderedPrompt(text, literals, add_special_tokens=not self._messages)

    def _text(self, values: dict[str, Any]) -> str:
        if self._config.column is not None:
            return self._column(values.get(self._config.column))
        if self._template is not None:
            return self._render(self._template, values)
        messages: list[ChatMessage] = [
            {"role": role, "content": self._render(template, values)} for role, template in self._messages
        ]
        assert self._chat_template is not None
        return self._chat_template.render(messages)

    def _column(self, value: Any) -> str:
        if value is None:
            raise RowFailure("null_prompt", f"column {self._config.column!r} is null")
        if not isinstance(value, str):
            raise RowFailure("not_a_string", f"column {self._config.column!r} holds {type_name(value)}, not a string")
        return value

    def _render(self, template: jinja2.Template, values: dict[str, Any]) -> str:
        try:
            return render(template, values if ROW in values else {**values, ROW: values})
        except RowFailure as failure:
            if not isinstance(failure.__cause__, NullPrinted):
                raise
            names = sorted(name for name in self._names if name in values and values[name] is None)
            which = f" ({', '.join(map(repr, names))} of this row is null)" if names else ""
            raise RowFailure(failure.error.code, failure.error.message + which) from failure


def type_name(value: Any) -> str:
    """A value's type in JSON's words where it has one."""
    names = {bool: "a boolean", int: "a number", float: "a number", dict: "an object", list: "an array"}
    return names.get(type(value), f"a value of type {type(value).__name__}")
