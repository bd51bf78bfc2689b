"""Sequences and sequence groups: one prompt and the samples or beams that grow from it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from batchgen.records import FinishReason, RowError, TokenLogprob
from batchgen.sampling_params import SamplingParams

if TYPE_CHECKING:
    from batchgen.engine.block_table import BlockTable
    from batchgen.engine.prefix_cache import CachedBlock
    from batchgen.tokenizer import StopMatcher


class Status(Enum):
    """Where a sequence is; WAITING ones hold no blocks."""

    UNBORN = auto()
    """A sample that forks off when its group's prompt is computed."""
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample or beam: `token_ids` is the prompt and what was generated."""

    group: SequenceGroup
    sample: int
    token_ids: array[int]
    status: Status = Status.WAITING
    table: BlockTable | None = None
    """Set while RUNNING."""
    chain: list[CachedBlock] = field(default_factory=list)
    """Links of the full blocks so far, as the prefix cache knows them."""
    num_computed_tokens: int = 0
    """Tokens whose K and V are in the cache."""
    cumulative_logprob: float = 0.0
    logprobs: list[list[TokenLogprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    matcher: StopMatcher | None = None
    text: str | None = None
    """Set where a stop string cut it; else the text is decoded at the end."""

    @property
    def num_generated(self) -> int:
        """Tokens after the prompt."""
        return len(self.token_ids) - self.group.num_prompt_tokens

    def append(self, token_id: int) -> bool:
        """Take a drawn token; True if the sequence ends with it, `finish_reason` then says why."""
        group = self.group
        self.token_ids.append(token_id)
        if token_id in group.stop_token_ids:
            self.finish_reason = "stop"
            # As in OpenAI's and vLLM's answers, eos itself gives no stop_reason.
            self.stop_reason = token_id if token_id in group.params.stop_token_ids else None
        elif self.matcher is not None and (match := self.matcher.append(token_id)) is not None:
            self.finish_reason, self.stop_reason, self.text = "stop", match.stop, match.text
        elif self.num_generated >= group.max_tokens:
            self.finish_reason = "length"
        return self.finish_reason is not None

    @property
    def generated_token_ids(self) -> list[int]:
        """Ids after the prompt."""
        return self.token_ids[self.group.num_prompt_tokens :].tolist()


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """All sequences of one prompt."""

    prompt_index: int
    prompt_token_ids: array[int]
    params: SamplingParams
    source: int
    row: int
    seed: int
    max_tokens: int
    """Resolved: what was asked for, at most what the context leaves."""
    sequences: list[Sequence] = field(default_factory=list)
    num_unfinished: int = 0
    error: RowError | None = None
    stop_token_ids: frozenset[int] = frozenset()
    """Ids that end a sample: eos ids, unless ignored, and params.stop_token_ids."""
    has_unborn: bool = False
    """Whether samples 1.. still wait to be forked from sample 0."""
    age: int = -1
    """Order of first admission, -1 before it; the largest is preempted first."""
    cached_tokens: int = 0
    """Prompt tokens that the first admission found in the cache."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt alone."""
        return len(self.prompt_token_ids)
