"""Rows to prompts: the job's templates over the columns, and the model's chat template around them."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from batchgen.config import PromptConfig
from batchgen.data.chat_messages import ChatMessage, chat_of, messages_of, type_name
from batchgen.data.chat_template import ChatTemplate
from batchgen.data.control_tokens import ControlTokens
from batchgen.data.input_rows import RowFailure
from batchgen.data.json_text import check_characters
from batchgen.data.names import near_names
from batchgen.data.requests import request_of
from batchgen.data.row_template import ROW, RowTemplate
from batchgen.data.sandbox import row_environment
from batchgen.errors import JobError
from batchgen.tokenizer import RenderedPrompt

__all__ = ["ChatTemplate", "PromptTemplate", "RowFailure"]

_SYSTEM_ROLES = ("system", "developer")


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
        self._templates: list[RowTemplate] = []
        self._column = config.column or config.messages_column or config.request_column
        self._text_template = self._compile(config.template, "template")
        self._system = self._compile(config.system, "system")
        self._prefill = self._compile(config.assistant_prefill, "assistant_prefill")
        self._messages = [
            (message.role, self._compiled(message.content, f"prompt.messages[{index}].content"))
            for index, message in enumerate(config.messages or [])
        ]
        self._shots: list[ChatMessage] = []
        self._shots_text = ""
        # A request may be a text, and then needs no chat template.
        if config.is_chat and (config.request_column is None or chat_template is not None):
            self._probe_chat()
        if config.few_shot is not None:
            self._render_shots()

    def _compile(self, source: str | None, key: str) -> RowTemplate | None:
        return None if source is None else self._compiled(source, f"prompt.{key}")

    def _compiled(self, source: str, key: str) -> RowTemplate:
        template = RowTemplate(self._environment, source, key)
        self._templates.append(template)
        return template

    def _probe_chat(self) -> None:
        if self._chat_template is None:
            raise JobError("prompt: the model has no chat template; use prompt.template, or set prompt.chat_template")
        system = [] if self._system is None else ["system"]
        roles = [role for role, _ in self._messages] or ["user"]
        self._chat_template.probe([*system, *roles], prefill=self._prefill is not None)

    def _render_shots(self) -> None:
        """Examples are the job's own text, the same for every row: rendered once, and free to hold control tokens."""
        shots = self._config.few_shot
        assert shots is not None
        assert shots.examples is not None
        answer = RowTemplate(self._environment, shots.answer, "prompt.few_shot.answer")
        for index, example in enumerate(shots.examples):
            try:
                if self._text_template is not None:
                    text = self._text_template.render(example) + answer.render(example)
                    self._shots_text += text + shots.separator
                else:
                    spoken = [(role, each) for role, each in self._messages if role not in _SYSTEM_ROLES]
                    self._shots += [*_turns(spoken, example), {"role": "assistant", "content": answer.render(example)}]
            except RowFailure as failure:
                raise JobError(f"prompt.few_shot.examples[{index}]: {failure.error.message}") from failure

    def columns(self, available: Collection[str]) -> frozenset[str]:
        """The columns that the prompt reads; JobError, with near names, for one that is not `available`.

        An empty `available` means that nothing is known of the columns, and nothing is refused.
        """
        names = set() if self._column is None else {self._column}
        for template in self._templates:
            names |= template.names | template.function_names.intersection(available)
        if ROW in names and ROW not in available:
            return frozenset(available)
        for name in sorted(names.difference(available)) if available else ():
            raise JobError(f"prompt: no column {name!r} in the input{near_names(name, available)}")
        return frozenset(names)

    def render(self, values: dict[str, Any]) -> RenderedPrompt:
        """The prompt of a row; RowFailure where the row has none."""
        # Before characters of values are marked, which would break JSON.
        values = self._without_json(values)
        text, literals = self._control_tokens.render(self._text, values)
        if not text:
            raise RowFailure("empty_prompt", "the prompt is empty")
        check_characters(text)
        return RenderedPrompt(text, literals, add_special_tokens=not self._is_chat(values))

    def _without_json(self, values: dict[str, Any]) -> dict[str, Any]:
        """The values with a chat or a request that is JSON text as what it stands for."""
        config = self._config
        if config.request_column is not None:
            return {config.request_column: request_of(values.get(config.request_column), config.request_column)}
        column = config.messages_column
        if column is None or not isinstance(values.get(column), str):
            return values
        return {**values, column: messages_of(values[column], column)}

    def _is_chat(self, values: dict[str, Any]) -> bool:
        column = self._config.request_column
        return self._config.is_chat if column is None else "messages" in values[column]

    def _text(self, values: dict[str, Any]) -> str:
        if self._text_template is not None:
            return self._shots_text + self._text_template.render(values)
        if self._config.column is not None:
            return self._column_text(values)
        if not self._is_chat(values):
            return str(values[str(self._config.request_column)]["prompt"])
        if self._chat_template is None:
            raise RowFailure("bad_request", "the request has messages, but the model has no chat template")
        prefill = None if self._prefill is None else self._prefill.render(values)
        return self._chat_template.render(self._chat(values), prefill)

    def _column_text(self, values: dict[str, Any]) -> str:
        column = self._config.column
        assert column is not None
        value = values.get(column)
        if value is None:
            raise RowFailure("null_prompt", f"column {column!r} is null")
        if not isinstance(value, str):
            raise RowFailure("not_a_string", f"column {column!r} holds {type_name(value)}, not a string")
        return value

    def _chat(self, values: dict[str, Any]) -> list[ChatMessage]:
        chat = self._turns_of(values)
        if self._system is not None and chat[0]["role"] not in _SYSTEM_ROLES:
            chat = [{"role": "system", "content": self._system.render(values)}, *chat]
        num_system = next((index for index, turn in enumerate(chat) if turn["role"] not in _SYSTEM_ROLES), len(chat))
        return [*chat[:num_system], *self._shots, *chat[num_system:]]

    def _turns_of(self, values: dict[str, Any]) -> list[ChatMessage]:
        config = self._config
        if config.messages_column is not None:
            return chat_of(values.get(config.messages_column), config.messages_column)
        if config.request_column is not None:
            return chat_of(values[config.request_column]["messages"], f"{config.request_column}.messages")
        return _turns(self._messages, values)


def _turns(messages: Sequence[tuple[str, RowTemplate]], values: Mapping[str, Any]) -> list[ChatMessage]:
    return [{"role": role, "content": template.render(values)} for role, template in messages]
