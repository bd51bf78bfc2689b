"""Ranges of the input to token ids: read, render, encode. Runs in the feeder's child, where templates are at home."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from batchgen.data.input_rows import InputRow, InputScan, RowFailure
from batchgen.data.reader import PromptReader
from batchgen.data.reasoning import opens_reasoning
from batchgen.data.requests import parameters_of, request_of
from batchgen.data.row_format import RowFormat
from batchgen.pipeline.child import is_one, serve
from batchgen.pipeline.machine_errors import machine_errors, unfolding_named
from batchgen.pipeline.ports import EncodedRow
from batchgen.pipeline.prompts import PreparerSpec, make_prompts
from batchgen.records import RowError, RowRange
from batchgen.tokenizer import RenderedPrompt, Tokenizer


class Preparer:
    """Makes prompts of rows."""

    def __init__(self, spec: PreparerSpec) -> None:
        """Load the tokenizer and compile the templates; JobError for what is wrong with every row."""
        tokenizer = _tokenizer(spec.model_directory)
        bos_token_id = None if tokenizer is None else tokenizer.bos_token_id
        self._fit = PromptFit(spec.prompt.truncate, spec.max_model_len, bos_token_id)
        self._request_column = spec.prompt.request_column
        self._sampling = spec.sampling
        self._prompts = make_prompts(spec, tokenizer)
        scan = InputScan.from_json(spec.scan)
        names = scan.source_schema.names
        columns = self._prompts.columns(names)
        self._format: RowFormat | None = None
        form = spec.sampling.response_format
        if form is not None and form.by is not None and form.of is not None:
            self._format = RowFormat(form.by, form.of, spec.started)
            columns |= self._format.columns(names)
        self._reader = PromptReader(scan, spec.input, columns, check_carried=True)

    def read(self, rows: RowRange) -> list[InputRow]:
        """The rows of a range."""
        return list(self._reader.read(rows))

    def close(self) -> None:
        """Close the input's files."""
        self._reader.close()

    def answer(self, rows: RowRange, alive: Callable[[], None]) -> list[EncodedRow]:
        """Read and prepare a range of rows."""
        # Rows that are too much together end this process, and the feeder asks for one at a time.
        with machine_errors(), unfolding_named() if is_one(rows) else nullcontext():
            read = self.read(rows)
        alive()
        return self.prepare(read, alive)

    def prepare(self, rows: list[InputRow], alive: Callable[[], None]) -> list[EncodedRow]:
        """Ids or an error for each row, in order; `alive` is called each time a part of the work is done."""
        made = [self._made(row) for row in rows]
        ids = self._prompts.encode([each.prompt for each in made if not isinstance(each, RowError)], alive)
        return [
            EncodedRow(row.source, row.row, None, each)
            if isinstance(each, RowError)
            else self._encoded(row, each, next(ids))
            for row, each in zip(rows, made, strict=True)
        ]

    def _made(self, row: InputRow) -> _Made | RowError:
        if row.error is not None:
            return row.error
        try:
            prompt = self._prompts.make(row.values)
            name = None if self._format is None else self._format.name(row.values)
            return _Made(prompt, name, self._parameters(row.values))
        except RowFailure as failure:
            return failure.error

    def _parameters(self, values: dict[str, Any]) -> dict[str, Any] | None:
        column = self._request_column
        return None if column is None else parameters_of(request_of(values.get(column), column), self._sampling)

    def _encoded(self, row: InputRow, made: _Made, ids: array[int]) -> EncodedRow:
        max_tokens = (made.parameters or {}).get("max_tokens", self._sampling.max_tokens)
        fitting, error = self._fit(ids, max_tokens)
        is_thinking = isinstance(made.prompt, RenderedPrompt) and opens_reasoning(made.prompt.text)
        return EncodedRow(row.source, row.row, fitting, error, made.format_name, is_thinking, made.parameters)


def main() -> None:
    """What the child runs."""
    serve(Preparer)


@lru_cache(maxsize=1)
def _tokenizer(directory: Path) -> Tokenizer | None:
    """The child that has checked the prompts prepares them too, and loads it once."""
    return Tokenizer.from_directory(directory)


class _Made(NamedTuple):
    """A prompt before it is encoded, and what else the engine must know of the row."""

    prompt: Any
    format_name: str | None
    parameters: dict[str, Any] | None


class PromptFit:
    """What is done with a prompt that does not fit into the model's context."""

    def __init__(self, truncate: str, max_model_len: int, bos_token_id: int | None) -> None:
        self._truncate = truncate
        self._max_model_len = max_model_len
        self._bos_token_id = bos_token_id

    def _longest(self, max_tokens: int | None) -> int:
        """Without a cut, one token must be left for the completion; a cut leaves room for `max_tokens`.

        Where `max_tokens` is None or is no less than the context, a cut leaves a quarter of the context.
        """
        room = 0 if max_tokens == 0 else 1
        if self._truncate != "error":
            is_given = max_tokens is not None and max_tokens < self._max_model_len
            room = max_tokens if is_given and max_tokens is not None else max(room, self._max_model_len // 4)
        return self._max_model_len - room

    def __call__(self, ids: array[int], max_tokens: int | None) -> tuple[array[int] | None, RowError | None]:
        """The ids that the model gets, or the error `prompt_too_long`; `empty_prompt` where there is no id."""
        if not ids:
            return None, RowError("empty_prompt", "the prompt has no tokens")
        longest = self._longest(max_tokens)
        if len(ids) <= longest:
            return ids, None
        if self._truncate == "error" or longest < 2:
            what = f"the prompt has {len(ids)} tokens; the model takes {self._max_model_len} with the completion"
            return None, RowError("prompt_too_long", what)
        head = longest
        if self._truncate == "left":
            head = 1 if ids[0] == self._bos_token_id else 0
        elif self._truncate == "middle":
            head = (longest + 1) // 2
        tail = longest - head
        return ids[:head] + ids[len(ids) - tail :], None
