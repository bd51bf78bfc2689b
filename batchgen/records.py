"""The small records that rows become on their way through batchgen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from batchgen.sampling_params import SamplingParams

FinishReason = Literal["stop", "length"]


class RowRange(NamedTuple):
    """Rows `start` up to but not including `stop` of one file; rows are physical, so skipped blank lines count."""

    source: int
    """Index of the file in the frozen, sorted list of inputs."""
    start: int
    stop: int


class Shard(NamedTuple):
    """One unit of work and one file of the output: ranges of input rows, in input order."""

    number: int
    ranges: tuple[RowRange, ...]


class RowError(NamedTuple):
    """Why a row has no (complete) answer; the message holds figures of the row itself only."""

    code: str
    message: str


class TokenLogprob(NamedTuple):
    """One alternative at one position: raw log-probability, before temperature and filters."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token of the vocabulary."""


@dataclass(slots=True)
class PartialSample:
    """The tokens that an unfinished sample had when it was interrupted; generation goes on after them."""

    sample: int
    token_ids: list[int]
    cumulative_logprob: float = 0.0
    logprobs: list[list[TokenLogprob]] | None = None


@dataclass(slots=True)
class Prompt:
    """One request to the engine.

    `source` and `row` key the random numbers (they are the row's identity, never its position in a batch);
    where `row` is None it is the prompt's index in the call.
    """

    text: str | None = None
    """Tokenized by the engine when `token_ids` is None."""
    token_ids: list[int] | None = None
    params: SamplingParams | None = None
    source: int = 0
    row: int | None = None
    partial: list[PartialSample] = field(default_factory=list)
    """Samples begun by an earlier run."""


@dataclass(slots=True)
class Sample:
    """One finished sample or beam of a prompt."""

    token_ids: list[int]
    """Generated ids, with the eos or stop id that ended them."""
    text: str | None
    """None where the model has no tokenizer."""
    finish_reason: FinishReason | None
    """None where the sample failed; its row then has the error."""
    stop_reason: int | str | None = None
    """The stop id or stop string that ended it; None for eos and for length."""
    text_complete: bool = True
    """False where the last ids are an incomplete character, which the text leaves out."""
    cumulative_logprob: float = 0.0
    """Sum of the raw log-probabilities of `token_ids`."""
    score: float | None = None
    """Beams only: cumulative processed log-probability over length ** length_penalty."""
    seed: int | None = None
    logprobs: list[list[TokenLogprob]] | None = None
    """One list per generated token, the drawn token first, then the most likely ones in falling order."""


@dataclass(slots=True)
class Completion:
    """All samples of one prompt, or the reason why there are none."""

    prompt_index: int
    """Position in the iterable given to `Engine.generate`."""
    prompt_token_ids: list[int]
    samples: list[Sample]
    error: RowError | None = None
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None
    cached_tokens: int = 0
    """Prompt tokens served from shared prefixes; depends on neighbours, so it never goes into a row."""
    seconds: float = 0.0
    """From the first step of its first sequence to the end of the last one; 0 where it never ran. Never in a row."""
