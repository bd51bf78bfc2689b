"""Finished rows: what generation adds to an input row, in the form that the journal and the shards store."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from batchgen.data.reasoning import split_reasoning
from batchgen.records import Completion, FinishReason, RowError, Sample, TokenLogprob

RowKey = tuple[int, int]
"""(source, row): the identity of an input row, whatever the order of work."""

Logprobs = list[list[tuple[int, float | None, int]]]
"""Per generated token the drawn token and its alternatives, as (token id, log-probability, rank)."""

PromptLogprobs = list[list[tuple[int, float | None, int]] | None]
"""The same per token of the prompt; None for the first one, which follows nothing."""


class KeptColumns(NamedTuple):
    """Which bulky columns the output asks for; others are dropped as soon as a row is finished."""

    token_ids: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    reasoning: bool = False
    """Whether what a model thinks is told from its answer."""


@dataclass(slots=True)
class FinishedSample:
    """One sample or beam as it is stored."""

    text: str | None
    finish_reason: FinishReason | None
    stop_reason: str | None
    text_complete: bool
    completion_tokens: int
    seed: int | None
    cumulative_logprob: float | None
    score: float | None
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    reasoning: str | None = None
    """What `text` leaves out where reasoning is split off."""


@dataclass(slots=True)
class FinishedRow:
    """Everything that batchgen adds to one input row."""

    source: int
    row: int
    error: RowError | None = None
    prompt_tokens: int | None = None
    """None where the prompt was never tokenized."""
    samples: list[FinishedSample] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def key(self) -> RowKey:
        return self.source, self.row

    @property
    def completion_tokens(self) -> int:
        """Generated tokens of all samples."""
        return sum(sample.completion_tokens for sample in self.samples)


def finished_row(
    source: int, row: int, completion: Completion, kept: KeptColumns, *, is_thinking: bool = False
) -> FinishedRow:
    """Turn the engine's completion of a row into what is stored of it.

    `is_thinking` tells that the prompt ended where the model was to go on thinking.
    """
    return FinishedRow(
        source=source,
        row=row,
        error=completion.error,
        prompt_tokens=len(completion.prompt_token_ids),
        samples=[_finished_sample(sample, kept, is_thinking) for sample in completion.samples],
        prompt_logprobs=_plain_prompt_logprobs(completion) if kept.prompt_logprobs else None,
    )


def _finished_sample(sample: Sample, kept: KeptColumns, is_thinking: bool) -> FinishedSample:
    reasoning, text = None, sample.text
    if kept.reasoning and text is not None:
        reasoning, text = split_reasoning(text, is_thinking)
    return FinishedSample(
        text=text,
        finish_reason=sample.finish_reason,
        stop_reason=None if sample.stop_reason is None else str(sample.stop_reason),
        text_complete=sample.text_complete,
        completion_tokens=len(sample.token_ids),
        seed=sample.seed,
        cumulative_logprob=finite(sample.cumulative_logprob),
        score=finite(sample.score),
        token_ids=list(sample.token_ids) if kept.token_ids else None,
        logprobs=_plain_logprobs(sample.logprobs) if kept.logprobs and sample.logprobs is not None else None,
        reasoning=reasoning,
    )


def finite(value: float | None) -> float | None:
    """None for infinities and NaN, which JSON and some readers cannot hold."""
    return value if value is not None and math.isfinite(value) else None


def _plain_logprobs(logprobs: Iterable[Iterable[TokenLogprob]]) -> Logprobs:
    return [_plain_entries(position) for position in logprobs]


def _plain_prompt_logprobs(completion: Completion) -> PromptLogprobs | None:
    if completion.prompt_logprobs is None:
        return None
    return [None if position is None else _plain_entries(position) for position in completion.prompt_logprobs]


def _plain_entries(position: Iterable[TokenLogprob]) -> list[tuple[int, float | None, int]]:
    return [(entry.token_id, finite(entry.logprob), entry.rank) for entry in position]


def row_to_json(row: FinishedRow) -> list[Any]:
    """A finished row as JSON values; `row_from_json` gives back an equal one."""
    samples = [
        [
            sample.text,
            sample.finish_reason,
            sample.stop_reason,
            sample.text_complete,
            sample.completion_tokens,
            sample.seed,
            sample.cumulative_logprob,
            sample.score,
            sample.token_ids,
            sample.logprobs,
            sample.reasoning,
        ]
        for sample in row.samples
    ]
    return [row.source, row.row, row.error, row.prompt_tokens, samples, row.prompt_logprobs]


def row_from_json(value: list[Any]) -> FinishedRow:
    """Inverse of `row_to_json`."""
    source, row, error, prompt_tokens, samples, prompt_logprobs = value
    return FinishedRow(
        source=source,
        row=row,
        error=None if error is None else RowError(*error),
        prompt_tokens=prompt_tokens,
        samples=[_sample_from_json(sample) for sample in samples],
        prompt_logprobs=None if prompt_logprobs is None else [_entries_from_json(each) for each in prompt_logprobs],
    )


def _entries_from_json(position: list[Any] | None) -> list[tuple[int, float | None, int]] | None:
    return None if position is None else [cast(tuple[int, float | None, int], tuple(entry)) for entry in position]


def _sample_from_json(value: list[Any]) -> FinishedSample:
    sample = FinishedSample(*value)
    if sample.logprobs is not None:
        sample.logprobs = [[cast(tuple[int, float | None, int], tuple(e)) for e in each] for each in sample.logprobs]
    return sample
