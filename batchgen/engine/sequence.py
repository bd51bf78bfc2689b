"""Sequences and sequence groups: one prompt and the samples or beams that grow from it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from batchgen.engine.constraint import Constraint
from batchgen.engine.logprob_trail import LogprobTrail, trail_entries
from batchgen.engine.token_bias import NO_EDITS, TokenEdits
from batchgen.engine.token_history import TokenHistory
from batchgen.records import FinishReason, RowError, TokenLogprob
from batchgen.sampling_params import SamplingParams

if TYPE_CHECKING:
    from batchgen.engine.beam import BeamSearch
    from batchgen.engine.block_table import BlockTable
    from batchgen.engine.prefix_cache import CachedBlock
    from batchgen.grammar import Grammar
    from batchgen.stop_strings import StopMatcher, StopStringMatcher


class Status(Enum):
    """Where a sequence is; only RUNNING ones hold blocks."""

    UNBORN = auto()
    """A sample that forks off when its group's prompt is computed."""
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Ending(NamedTuple):
    """Why a sequence ended."""

    finish_reason: FinishReason
    stop_reason: int | str | None = None
    """The stop id or stop string; None for eos, as in OpenAI's answers, and for length."""
    text: str | None = None
    """Where a stop string ended it: the text before it."""

    @property
    def is_cut(self) -> bool:
        """Whether max_tokens ended it."""
        return self.finish_reason == "length"


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample or beam: `token_ids` is the prompt and what was generated."""

    group: SequenceGroup
    sample: int
    """Number of the sample, which keys its random numbers; of a beam only a place among the live ones."""
    token_ids: array[int]
    status: Status = Status.WAITING
    table: BlockTable | None = None
    """Set while RUNNING."""
    chain: list[CachedBlock] = field(default_factory=list)
    """Links of the full blocks so far, as the prefix cache knows them."""
    num_computed_tokens: int = 0
    """Tokens whose K and V are in the cache, or will be once the steps that were launched have run."""
    num_unseen: int = 0
    """Tokens of launched steps whose ids only the device knows as yet; `token_ids` is without them."""
    draw: int = 0
    """Which draw of its step the newest unseen token is."""
    cumulative_logprob: float = 0.0
    trail: LogprobTrail | None = None
    """Where asked for: the log-probabilities of the generated tokens."""
    score: float = 0.0
    """Beams: sum of the processed log-probabilities."""
    ending: Ending | None = None
    matcher: StopMatcher | None = None
    history: TokenHistory | None = None
    """Kept where penalties need it."""
    constraint: Constraint | None = None
    """Where a grammar binds it: how far the text has got in it."""
    pending: array[int] = field(default_factory=lambda: array("i"))
    """With log-probabilities asked for: tokens that the grammar forces next, one a step."""
    num_forced: int = 0
    """Generated tokens that the grammar left no choice for."""

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens, unseen ones too."""
        return len(self.token_ids) + self.num_unseen

    @property
    def num_generated(self) -> int:
        """Tokens after the prompt, unseen ones too."""
        return len(self.token_ids) + self.num_unseen - self.group.num_prompt_tokens

    @property
    def generated_token_ids(self) -> list[int]:
        """Ids after the prompt."""
        return self.token_ids[self.group.num_prompt_tokens :].tolist()

    @property
    def logprobs(self) -> list[list[TokenLogprob]] | None:
        """One entry per generated token; None where they are not asked for."""
        return None if self.group.params.logprobs is None else trail_entries(self.trail)

    @property
    def is_scored(self) -> bool:
        """Whether the logits of its prompt are wanted, and so none of it may come from the cache."""
        return self.sample == self.group.scored_sample and self.group.needs_scores

    def note(self, logprob: float, alternatives: list[TokenLogprob] | None) -> None:
        """Account for the log-probability of the next token, before it is appended."""
        if not self.pending:
            self.cumulative_logprob += logprob
        if alternatives is not None:
            self.trail = LogprobTrail(self.trail, alternatives)

    def append(self, token_id: int) -> bool:
        """Take a drawn token, and those that a grammar forces after it; True if the sequence ends with them."""
        self._take(token_id)
        if self.constraint is not None:
            self._follow(self.constraint, token_id)
        return self.ending is not None

    def begin(self) -> None:
        """Take what the grammar forces at the very start."""
        if self.constraint is not None:
            self._follow(self.constraint, None)

    def _follow(self, constraint: Constraint, token_id: int | None) -> None:
        was_forced = len(self.pending) > 0
        if was_forced:
            self.num_forced += 1
            del self.pending[0]
        if token_id is not None and token_id not in self.group.stop_token_ids:
            constraint.accept([token_id])
        # A run is what follows a draw, whether it is taken at once or one by one.
        if self.ending is None and not was_forced:
            self._take_forced(constraint)
        may_end = not self.pending and (self.ending is None or self.ending is _LENGTH)
        if may_end and constraint.is_over:
            self.ending = _GRAMMAR

    def _take_forced(self, constraint: Constraint) -> None:
        run = constraint.forced()
        if self.group.params.logprobs is not None:
            self.pending.extend(run)
            return
        for count, token_id in enumerate(run, 1):
            self._take(token_id)
            if self.ending is not None:
                run = run[:count]
                break
        self.num_forced += len(run)
        if run:
            constraint.accept(run)

    def _take(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        if self.history is not None:
            self.history.append(token_id)
        group = self.group
        if token_id in group.stop_token_ids:
            self.ending = group.stopped_by(token_id)
        elif self.matcher is not None and (match := self.matcher.append(token_id)) is not None:
            self.ending = Ending("stop", match.stop, match.text)
        elif len(self.token_ids) - group.num_prompt_tokens >= group.max_tokens:
            self.ending = _LENGTH

    def release(self) -> None:
        """Nothing more is appended; a second call does nothing."""
        if self.constraint is not None:
            self.constraint.release()

    def ending_with(self, token_id: int) -> Ending | None:
        """How the sequence would end with `token_id`; nothing is appended."""
        if token_id in self.group.stop_token_ids:
            return self.group.stopped_by(token_id)
        if self.matcher is not None and (match := self.matcher.fork().append(token_id)) is not None:
            return Ending("stop", match.stop, match.text)
        return _LENGTH if self.num_generated + 1 >= self.group.max_tokens else None

    def fork(self, sample: int) -> Sequence:
        """A twin that shares the blocks until one of both writes."""
        return Sequence(
            group=self.group,
            sample=sample,
            token_ids=self.token_ids[:],
            status=self.status,
            table=None if self.table is None else self.table.fork(),
            chain=self.chain[:],
            num_computed_tokens=self.num_computed_tokens,
            cumulative_logprob=self.cumulative_logprob,
            trail=self.trail,
            score=self.score,
            matcher=None if self.matcher is None else self.matcher.fork(),
            history=None if self.history is None else self.history.fork(),
            constraint=None if self.constraint is None else self.constraint.fork(),
            pending=self.pending[:],
            num_forced=self.num_forced,
        )


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
    """Samples by number; of a beam search the live beams, best first."""
    search: BeamSearch | None = None
    num_unfinished: int = 0
    error: RowError | None = None
    stop_token_ids: frozenset[int] = frozenset()
    """Ids that end a sample: eos ids, unless ignored, and params.stop_token_ids."""
    stops: StopStringMatcher | None = None
    """Finds params.stop in the text."""
    grammar: Grammar | None = None
    """What the text of every sample must match."""
    edits: TokenEdits = NO_EDITS
    """What is added to single logits."""
    has_unborn: bool = False
    """Whether samples 1.. still wait to be forked from sample 0."""
    age: int = -1
    """Order of first admission, -1 before it; the largest is preempted first."""
    cached_tokens: int = 0
    """Prompt tokens that the first admission found in the cache."""
    started: float = 0.0
    """When it was first admitted, by the monotonic clock in seconds; 0 before it."""
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None
    """Where asked for: one entry per prompt token, filled in as the prompt is computed; the first stays None."""
    scored_sample: int = 0
    """The sample that computes the prompt for `prompt_logprobs`."""
    num_scored: int = 1
    """Prompt tokens whose entry is final."""
    num_prompt_tokens: int = field(init=False)
    """Tokens of the prompt alone."""
    last_token: int = field(init=False)
    """Index of the last token that a sample may have."""

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.last_token = self.num_prompt_tokens + self.max_tokens - 1

    @property
    def num_places(self) -> int:
        """Running sequences that the group may grow to at once."""
        return 1 if self.search is None else self.search.params.width

    @property
    def draws_follow_text(self) -> bool:
        """Whether what may be drawn next depends on which tokens came before: then the host must know these."""
        return self.params.has_penalties or self.edits.follow_text or self.grammar is not None

    @property
    def needs_scores(self) -> bool:
        """Whether logits of prompt tokens are still to be looked at."""
        return self.prompt_logprobs is not None and self.num_scored < self.num_prompt_tokens

    def new_sequence(self, sample: int) -> Sequence:
        """A sequence that waits with the prompt alone."""
        sequence = Sequence(self, sample, self.prompt_token_ids[:])
        if self.stops is not None:
            sequence.matcher = self.stops.start(self.prompt_token_ids, self.params.min_tokens)
        if self.params.has_penalties:
            sequence.history = TokenHistory(self.prompt_token_ids)
        if self.grammar is not None:
            sequence.constraint = Constraint(self.grammar)
            sequence.begin()
        return sequence

    def stopped_by(self, token_id: int) -> Ending:
        """The ending by one of `stop_token_ids`."""
        return Ending("stop", token_id if token_id in self.params.stop_token_ids else None)


_LENGTH = Ending("length")
_GRAMMAR = Ending("stop")
