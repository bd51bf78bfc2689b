"""Ranges of the input to token ids: read, render, encode. Runs in the feeder's child, where templates are at home."""

from __future__ import annotations

import datetime
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from batchgen.config import InputConfig, PromptConfig
from batchgen.data.input_rows import InputRow, InputScan, RowFailure
from batchgen.data.reader import PromptReader
from batchgen.data.template import ChatTemplate, PromptTemplate
from batchgen.errors import JobError
from batchgen.records import RowError, RowRange
from batchgen.tokenizer import RenderedPrompt, Tokenizer

_ENCODE_CHARACTERS = 2**20
"""Text that is encoded in one call: what bounds the memory and the time between two signs of life."""


@dataclass(frozen=True)
class PreparerSpec:
    """All that decides what a row's prompt is; travels to the child."""

    scan: dict[str, Any]
    """`InputScan.to_json`."""
    input: InputConfig
    prompt: PromptConfig
    model_directory: Path
    max_model_len: int
    max_tokens: int | None
    """`sampling.max_tokens`."""
    started: datetime.datetime
    """The start of the job, which is what templates see as now."""


class EncodedRow(NamedTuple):
    """A prepared row as it travels back: ids in four bytes each, no values."""

    source: int
    row: int
    token_ids: array[int] | None
    error: RowError | None


class Preparer:
    """Makes prompts of rows."""

    def __init__(self, spec: PreparerSpec) -> None:
        """Load the tokenizer and compile the templates; JobError for what is wrong with every row."""
        tokenizer = Tokenizer.from_directory(spec.model_directory)
        if tokenizer is None:
            raise JobError(
                f"{spec.model_directory}: the model has no tokenizer, so it cannot read prompts that are text"
            )
        self._tokenizer = tokenizer
        self._fit = PromptFit(spec.prompt.truncate, spec.max_model_len, spec.max_tokens, tokenizer.bos_token_id)
        self._template = PromptTemplate(
            spec.prompt,
            _chat_template(spec, tokenizer),
            control_tokens=tokenizer.special_token_strings,
            now=spec.started,
        )
        scan = InputScan.from_json(spec.scan)
        self._reader = PromptReader(scan, spec.input, self._template.columns(scan.source_schema.names))

    def read(self, rows: RowRange) -> list[InputRow]:
        """The rows of a range."""
        return list(self._reader.read(rows))

    def close(self) -> None:
        """Close the input's files."""
        self._reader.close()

    def prepare(self, rows: list[InputRow], alive: Callable[[], None]) -> list[EncodedRow]:
        """Ids or an error for each row, in order; `alive` is called each time a part of the work is done."""
        rendered = [self._render(row) for row in rows]
        encoded: list[array[int]] = []
        for prompts in _by_size([prompt for prompt in rendered if isinstance(prompt, RenderedPrompt)]):
            alive()
            encoded.extend(array("i", ids) for ids in self._tokenizer.encode_batch(prompts))
        next_ids = iter(encoded)
        return [
            EncodedRow(row.source, row.row, None, prompt)
            if isinstance(prompt, RowError)
            else EncodedRow(row.source, row.row, *self._fit(next(next_ids)))
            for row, prompt in zip(rows, rendered, strict=True)
        ]

    def _render(self, row: InputRow) -> RenderedPrompt | RowError:
        if row.error is not None:
            return row.error
        try:
            return self._template.render(row.values)
        except RowFailure as failure:
            return failure.error


def _chat_template(spec: PreparerSpec, tokenizer: Tokenizer) -> ChatTemplate | None:
    if spec.prompt.messages is None:
        return None
    if spec.prompt.chat_template is not None:
        return ChatTemplate(
            spec.prompt.chat_template, tokenizer.special_tokens_map, spec.started, "prompt.chat_template"
        )
    source = tokenizer.chat_template
    return None if source is None else ChatTemplate(source, tokenizer.special_tokens_map, spec.started)


def _by_size(prompts: list[RenderedPrompt]) -> Iterator[list[RenderedPrompt]]:
    batch: list[RenderedPrompt] = []
    size = 0
    for prompt in prompts:
        if batch and size + len(prompt.text) > _ENCODE_CHARACTERS:
            yield batch
            batch, size = [], 0
        batch.append(prompt)
        size += len(prompt.text)
    if batch:
        yield batch


class PromptFit:
    """What is done with a prompt that does not fit into the model's context."""

    def __init__(self, truncate: str, max_model_len: int, max_tokens: int | None, bos_token_id: int | None) -> None:
        """Without a cut, one token must be left for the completion; a cut leaves room for `max_tokens`.

        Where `max_tokens` is None or is no less than the context, a cut leaves a quarter of the context.
        """
        self._truncate = truncate
        self._max_model_len = max_model_len
        self._bos_token_id = bos_token_id
        room = 0 if max_tokens == 0 else 1
        if truncate != "error":
            is_given = max_tokens is not None and max_tokens < max_model_len
            room = max_tokens if is_given and max_tokens is not None else max(room, max_model_len // 4)
        self._longest = max_model_len - room

    def __call__(self, ids: array[int]) -> tuple[array[int] | None, RowError | None]:
        """The ids that the model gets, or the error `prompt_too_long`; `empty_prompt` where there is no id."""
        if not ids:
            return None, RowError("empty_prompt", "the prompt has no tokens")
        if len(ids) <= self._longest:
            return ids, None
        if self._truncate == "error" or self._longest < 2:
            what = f"the prompt has {len(ids)} tokens; the model takes {self._max_model_len} with the completion"
            return None, RowError("prompt_too_long", what)
        head = self._longest
        if self._truncate == "left":
            head = 1 if ids[0] == self._bos_token_id else 0
        elif self._truncate == "middle":
            head = (self._longest + 1) // 2
        tail = self._longest - head
        return ids[:head] + ids[len(ids) - tail :], None
