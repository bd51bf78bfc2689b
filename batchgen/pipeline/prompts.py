"""The ways of making prompts of rows: text that is rendered and encoded, or token ids as they stand."""

from __future__ import annotations

import datetime
import json
from array import array
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from batchgen.config import InputConfig, PromptConfig
from batchgen.data.template import ChatTemplate, PromptTemplate
from batchgen.data.token_ids import TokenIdsColumn
from batchgen.errors import JobError
from batchgen.sampling_params import SamplingParams
from batchgen.tokenizer import RenderedPrompt, Tokenizer

Made = TypeVar("Made")

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
    sampling: SamplingParams
    """The job's; a row that is a request may ask for others."""
    started: datetime.datetime
    """The start of the job, which is what templates see as now."""


class Prompts(Protocol[Made]):
    """One way of making prompts."""

    def columns(self, available: Collection[str]) -> frozenset[str]:
        """The columns that are read; JobError for one that is not available."""
        ...

    def make(self, values: dict[str, Any]) -> Made:
        """What a row's prompt is before it is encoded; RowFailure where the row has none."""
        ...

    def encode(self, made: list[Made], alive: Callable[[], None]) -> Iterator[array[int]]:
        """Token ids of each, in order; `alive` is called each time a part of the work is done."""
        ...


def make_prompts(spec: PreparerSpec, tokenizer: Tokenizer | None) -> Prompts[Any]:
    """The way that the job asks for; JobError where it cannot work for any row."""
    if spec.prompt.token_ids_column is not None:
        return TokenIdPrompts(TokenIdsColumn(spec.prompt.token_ids_column, _vocab_size(spec.model_directory)))
    if tokenizer is None:
        raise JobError(
            f"{spec.model_directory}: the model has no tokenizer, so it cannot read prompts that are text; "
            "use prompt.token_ids_column"
        )
    template = PromptTemplate(
        spec.prompt, _chat_template(spec, tokenizer), control_tokens=tokenizer.special_token_strings, now=spec.started
    )
    return TextPrompts(template, tokenizer)


class TextPrompts:
    """Prompts that are text."""

    def __init__(self, template: PromptTemplate, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.columns = template.columns
        self.make = template.render

    def encode(self, made: list[RenderedPrompt], alive: Callable[[], None]) -> Iterator[array[int]]:
        """Encode in batches of about the same size."""
        for prompts in _by_size(made):
            alive()
            for ids in self._tokenizer.encode_batch(prompts):
                yield array("i", ids)


class TokenIdPrompts:
    """Prompts that are token ids already."""

    def __init__(self, column: TokenIdsColumn) -> None:
        self.columns = column.columns
        self.make = column.ids

    def encode(self, made: list[array[int]], alive: Callable[[], None]) -> Iterator[array[int]]:
        """The ids as they stand."""
        return iter(made)


def _chat_template(spec: PreparerSpec, tokenizer: Tokenizer) -> ChatTemplate | None:
    source, key = spec.prompt.chat_template, "prompt.chat_template"
    if source is None:
        source, key = tokenizer.chat_template, "the model's chat template"
    if source is None or not spec.prompt.is_chat:
        return None
    return ChatTemplate(
        source,
        tokenizer.special_tokens_map,
        spec.started,
        key,
        kwargs=spec.prompt.chat_template_kwargs,
        tools=spec.prompt.tools,
    )


def _vocab_size(directory: Path) -> int | None:
    """Rows of the model's embedding, where its configuration says so."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return size if isinstance(size, int) else None


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
