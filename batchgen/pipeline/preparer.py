"""Ranges of the input to token ids: read, render, encode. Runs in the feeder's child, where templates are at home."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

from batchgen.data.input_rows import InputRow, InputScan, RowFailure
from batchgen.data.reader import PromptReader
from batchgen.data.row_format import RowFormat
from batchgen.pipeline.prompts import PreparerSpec, make_prompts
from batchgen.records import RowError, RowRange
from batchgen.tokenizer import Tokenizer


class EncodedRow(NamedTuple):
    """A prepared row as it travels back: ids in four bytes each, no values."""

    source: int
    row: int
    token_ids: array[int] | None
    error: RowError | None
    format_name: str | None = None


class Preparer:
    """Makes prompts of rows."""

    def __init__(self, spec: PreparerSpec) -> None:
        """Load the tokenizer and compile the templates; JobError for what is wrong with every row."""
        tokenizer = Tokenizer.from_directory(spec.model_directory)
        bos_token_id = None if tokenizer is None else tokenizer.bos_token_id
        self._fit = PromptFit(spec.prompt.truncate, spec.max_model_len, spec.max_tokens, bos_token_id)
        self._prompts = make_prompts(spec, tokenizer)
        scan = InputScan.from_json(spec.scan)
        names = scan.source_schema.names
        columns = self._prompts.columns(names)
        self._format: RowFormat | None = None
        form = spec.response_format
        if form is not None and form.by is not None and form.of is not None:
            self._format = RowFormat(form.by, form.of, spec.started)
            columns |= self._format.columns(names)
        self._reader = PromptReader(scan, spec.input, columns)

    def read(self, rows: RowRange) -> list[InputRow]:
        """The rows of a range."""
        return list(self._reader.read(rows))

    def close(self) -> None:
        """Close the input's files."""
        self._reader.close()

    def prepare(self, rows: list[InputRow], alive: Callable[[], None]) -> list[EncodedRow]:
        """Ids or an error for each row, in order; `alive` is called each time a part of the work is done."""
        made = [self._made(row) for row in rows]
        ids = self._prompts.encode([prompt for prompt, _ in made if not isinstance(prompt, RowError)], alive)
        return [
            EncodedRow(row.source, row.row, None, prompt)
            if isinstance(prompt, RowError)
            else EncodedRow(row.source, row.row, *self._fit(next(ids)), name)
            for row, (prompt, name) in zip(rows, made, strict=True)
        ]

    def _made(self, row: InputRow) -> tuple[Any, str | None]:
        """(prompt or error, name of the row's response format)."""
        if row.error is not None:
            return row.error, None
        try:
            prompt = self._prompts.make(row.values)
            return prompt, None if self._format is None else self._format.name(row.values)
        except RowFailure as failure:
            return failure.error, None


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
