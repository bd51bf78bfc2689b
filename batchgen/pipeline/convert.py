"""Outputs in other forms: JSON lines, chats to train on, and the answers of an OpenAI batch."""

from __future__ import annotations

import base64
import datetime
import json
import math
from collections.abc import Callable, Iterator
from contextlib import closing
from decimal import Decimal
from typing import Any, Literal, NamedTuple

from batchgen.data.chat_messages import ChatMessage
from batchgen.data.chat_template import ChatTemplate
from batchgen.data.input_rows import InputRow, InputScan
from batchgen.data.row_template import RowTemplate
from batchgen.data.sandbox import row_environment
from batchgen.data.template import PromptTemplate
from batchgen.errors import JobError
from batchgen.pipeline.bounded_reader import BoundedReader
from batchgen.pipeline.openai_answers import answer_lines
from batchgen.pipeline.output_rows import Row, committed_files, key_of, rows
from batchgen.pipeline.stored import StoredOutput

Form = Literal["jsonl", "chat", "openai-batch"]

_AS_JSON = "{{ messages | tojson }}"
"""A chat template that writes the messages themselves."""


class Line(NamedTuple):
    """One line of JSON of the converted file, or of the file of its errors."""

    value: dict[str, Any]
    is_error: bool = False


def convert(stored: StoredOutput, form: Form) -> Iterator[Line]:
    """The committed rows in another form, in order.

    `jsonl` has a line a row with all columns; `chat` a line a sample, the prompt as messages and the completion behind
    them, and leaves error rows out; `openai-batch` a line an input row, as OpenAI's batches answer, errors apart.
    Raises JobError where the output has no such form, InputError where `chat` finds that an input changed.
    """
    makers: dict[Form, Callable[[StoredOutput], Iterator[Line]]] = {
        "jsonl": _jsonl,
        "chat": _chat,
        "openai-batch": _openai_batch,
    }
    return makers[form](stored)


def json_value(value: Any) -> Any:
    """A value of a row as JSON has it: times in ISO 8601, bytes in base64, numbers that JSON lacks as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): json_value(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(each) for each in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return str(value) if isinstance(value, datetime.timedelta | Decimal) else value


def _jsonl(stored: StoredOutput) -> Iterator[Line]:
    for row in rows(stored):
        yield Line(json_value(row))


def _chat(stored: StoredOutput) -> Iterator[Line]:
    messages_of = _Messages(stored)
    tools = stored.job.prompt.tools
    for row, source in _with_inputs(stored, messages_of.columns):
        texts = stored.layout.texts(row)
        if row[stored.layout.struct_name]["status"] != "ok" or not texts:
            continue
        messages, begun = messages_of(source.values)
        for text in texts:
            chat = [*messages, {"role": "assistant", "content": begun + text}]
            yield Line({"messages": chat, **({"tools": tools} if tools else {})})


class _Messages:
    """The messages that the prompt of a row was made from, rendered anew from the row's values."""

    def __init__(self, stored: StoredOutput) -> None:
        prompt = stored.job.prompt
        if prompt.token_ids_column is not None:
            raise JobError("the prompts of this output are token ids (prompt.token_ids_column): they are no chat")
        now = datetime.datetime.fromisoformat(stored.plan.started)
        self._is_chat = prompt.is_chat
        plain = prompt.model_copy(update={"assistant_prefill": None})
        self._template = PromptTemplate(plain, ChatTemplate(_AS_JSON, {}, now) if prompt.is_chat else None, now=now)
        self._prefill = None
        if prompt.assistant_prefill is not None:
            self._prefill = RowTemplate(row_environment(now), prompt.assistant_prefill, "prompt.assistant_prefill")
        names = InputScan.from_json(stored.plan.scan).source_schema.names
        self.columns = self._template.columns(names) | (self._prefill.names if self._prefill else frozenset())

    def __call__(self, values: dict[str, Any]) -> tuple[list[ChatMessage], str]:
        """(messages, how the answer was begun); RowFailure cannot happen to a row that has an answer."""
        prompt = self._template.render(values)
        # A request may be a text, to which the tokenizer adds its special tokens; a chat template writes them itself.
        is_chat = self._is_chat and not prompt.add_special_tokens
        messages: list[ChatMessage] = json.loads(prompt.text) if is_chat else [{"role": "user", "content": prompt.text}]
        return messages, self._prefill.render(values) if self._prefill is not None else ""


def _with_inputs(stored: StoredOutput, columns: frozenset[str]) -> Iterator[tuple[Row, InputRow]]:
    """Each row of the output beside the row of the input that it came from."""
    scan = InputScan.from_json(stored.plan.scan)
    with closing(BoundedReader(scan, stored.job.input, columns)) as reader:
        for number, shard in committed_files(stored).items():
            source = (row for each in shard.summary.ranges for row in reader.read(each))
            current: InputRow | None = None
            for row in rows(stored, [number]):
                while current is None or (current.source, current.row) != key_of(row, stored):
                    current = next(source)
                yield row, current


def _openai_batch(stored: StoredOutput) -> Iterator[Line]:
    for line in answer_lines(stored):
        yield Line(line, is_error=line["error"] is not None)
