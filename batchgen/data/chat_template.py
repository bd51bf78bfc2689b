"""The model's chat template: messages to the text that the model was trained on."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from batchgen.data.input_rows import RowFailure
from batchgen.data.sandbox import chat_environment, compile_template, render
from batchgen.errors import JobError

ChatMessage = dict[str, Any]
"""`role`, `content` and what else the template reads."""


class ChatTemplate:
    """A compiled chat template; writes what transformers' `apply_chat_template(tokenize=False)` writes."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        now: datetime.datetime,
        key: str = "the model's chat template",
    ) -> None:
        """`special_tokens` are bos_token, eos_token …; `now` is what strftime_now sees; `key` names it in errors."""
        self.key = key
        self._special_tokens = dict(special_tokens)
        self._template = compile_template(chat_environment(now), source, key)

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The text of a chat, up to where the assistant is to speak; RowFailure where the template refuses it."""
        # transformers drops keys without a value too: many templates would print the word None.
        given = [{name: value for name, value in message.items() if value is not None} for message in messages]
        context = {"messages": given, "tools": None, "documents": None, "add_generation_prompt": True}
        return render(self._template, {**self._special_tokens, **context})

    def probe(self, roles: Sequence[str]) -> None:
        """Refuse, with the template's own words, a job whose roles the template does not take."""
        try:
            self.render([{"role": role, "content": "x"} for role in roles])
        except RowFailure as failure:
            message = failure.error.message
            raise JobError(f"{self.key} does not take messages by {', '.join(roles)}: {message}") from failure
