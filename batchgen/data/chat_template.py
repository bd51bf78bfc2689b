"""The model's chat template: messages to the text that the model was trained on."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import meta

from batchgen.data.chat_messages import ChatMessage, joined_parts
from batchgen.data.input_rows import RowFailure
from batchgen.data.names import near_names
from batchgen.data.sandbox import chat_environment, compile_template, render
from batchgen.errors import JobError

_RESERVED = frozenset({"messages", "documents", "add_generation_prompt", "continue_final_message"})
_REASONING = ("reasoning_content", "thinking", "reasoning")
_MARK = "batchgen_probe"
_END = "\U0002a6b2\U0002a6b1"
"""Put behind the beginning of an answer, to find where it ends in the text: two rare ideographs."""


class ChatTemplate:
    """A compiled chat template; writes what transformers' `apply_chat_template(tokenize=False)` writes."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        now: datetime.datetime,
        key: str = "the model's chat template",
        *,
        kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """`special_tokens` are bos_token, eos_token …; `now` is what strftime_now sees; `key` names it in errors.

        Raises JobError where it does not compile, and for `kwargs` and `tools` that it does not read.
        """
        self.key = key
        environment = chat_environment(now)
        self._template = compile_template(environment, source, key)
        read = meta.find_undeclared_variables(environment.parse(source)) - _RESERVED
        for name in kwargs or ():
            if name not in read - special_tokens.keys():
                raise JobError(f"prompt.chat_template_kwargs: {key} reads no {name!r}{near_names(name, read)}")
        if tools is not None and "tools" not in read:
            raise JobError(f"prompt.tools: {key} takes no tools; remove them")
        self._context = {**special_tokens, **(kwargs or {}), "tools": tools, "documents": None}
        self._takes_text = self._writes([{"role": "user", "content": _MARK}])
        self._takes_parts = self._writes([{"role": "user", "content": [{"type": "text", "text": _MARK}]}])

    def render(self, messages: Sequence[ChatMessage], prefill: str | None = None) -> str:
        """The text of a chat, up to where the assistant is to speak, or just behind `prefill`, its first words.

        RowFailure `template_error` where the template refuses the chat, or changes the first words.
        """
        if prefill is None:
            return self._write(messages, add_generation_prompt=True)
        last = {"role": "assistant", "content": prefill + _END}
        text = self._write([*messages, last], add_generation_prompt=False)
        if text.count(_END) != 1:
            raise RowFailure("template_error", "the chat template does not write the beginning of the answer once")
        text = text[: text.index(_END)]
        if not text.endswith(prefill):
            raise RowFailure("template_error", "the chat template changes the beginning of the answer; it may trim it")
        return text

    def probe(self, roles: Sequence[str], prefill: bool = False) -> None:
        """Refuse, with the template's own words, a job whose roles the template does not take."""
        try:
            self.render([{"role": role, "content": "x"} for role in roles], "x" if prefill else None)
        except RowFailure as failure:
            message = failure.error.message
            raise JobError(f"{self.key} does not take messages by {', '.join(roles)}: {message}") from failure

    def _write(self, messages: Sequence[ChatMessage], add_generation_prompt: bool) -> str:
        given = [self._as_read(message) for message in messages]
        context = {**self._context, "messages": given, "add_generation_prompt": add_generation_prompt}
        return render(self._template, context)

    def _as_read(self, message: ChatMessage) -> ChatMessage:
        # transformers drops keys without a value too: many templates would print the word None.
        given = {name: value for name, value in message.items() if value is not None}
        reasoning = next((given[name] for name in _REASONING if name in given), None)
        if reasoning is not None:
            given = {"thinking": reasoning, **given, "reasoning_content": reasoning}
        content = given.get("content")
        if isinstance(content, list) and not self._takes_parts:
            given["content"] = joined_parts(content)
        elif isinstance(content, str) and self._takes_parts and not self._takes_text:
            given["content"] = [{"type": "text", "text": content}]
        return given

    def _writes(self, messages: list[ChatMessage]) -> bool:
        """Whether the template writes the content, and not what Python calls it."""
        context = {**self._context, "messages": messages, "add_generation_prompt": True}
        try:
            text = render(self._template, context)
        except RowFailure:
            return False
        return _MARK in text and f"'{_MARK}'" not in text and f'"{_MARK}"' not in text
