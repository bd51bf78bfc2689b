"""Beam search, with the semantics of transformers 5.24's `generate` at batch 1 and the same eos list.

Decided in plain Python: the device hands over the best continuations of each live beam, already processed and
log-softmaxed; this says which beams live on, which are finished, and when the search is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from batchgen.engine.logprob_trail import LogprobTrail
from batchgen.records import TokenLogprob
from batchgen.sampling_params import BeamParams

if TYPE_CHECKING:
    from batchgen.engine.sequence import Ending, Sequence


class Continuation(NamedTuple):
    """One token that could follow a live beam."""

    token_id: int
    logprob: float
    """After the processors, which act on log-softmaxed scores and do not renormalise."""
    raw_logprob: float
    alternatives: list[TokenLogprob] | None = None


class Candidate(NamedTuple):
    """A live beam and one token after it."""

    parent: int
    """Index among the live beams."""
    score: float
    """Sum of the processed log-probabilities of all its generated tokens."""
    token: Continuation


@dataclass(slots=True)
class FinishedBeam:
    """A beam that ended, as it will be returned."""

    score: float
    """Sum of the processed log-probabilities over (new tokens) ** length_penalty."""
    token_ids: list[int]
    cumulative_logprob: float
    trail: LogprobTrail | None
    """Where asked for: the log-probabilities of its tokens."""
    ending: Ending


class BeamSearch:
    """The state of one search beyond its live beams: the best finished ones and whether they can still be improved."""

    def __init__(self, params: BeamParams, num_stop_ids: int, max_tokens: int) -> None:
        self.params = params
        self.max_tokens = max_tokens
        self.finished: list[FinishedBeam] = []
        """At most `width`, best first."""
        self.is_done = False
        # So many that `width` of them go on even if every stop id is the best continuation of every beam.
        self.num_candidates = max(2, 1 + num_stop_ids) * params.width

    def restarted(self) -> BeamSearch:
        """A new search for the same prompt."""
        search = BeamSearch(self.params, 0, self.max_tokens)
        search.num_candidates = self.num_candidates
        return search

    def advance(self, live: list[Sequence], continuations: list[list[Continuation]]) -> list[Candidate]:
        """Extend the live beams (best first) by one token; returns those that live on, best first."""
        best = self._best(live, continuations)
        endings = [live[candidate.parent].ending_with(candidate.token.token_id) for candidate in best]
        survivors = [candidate for candidate, ending in zip(best, endings, strict=True) if ending is None]
        length = live[0].num_generated + 1
        # The candidates past the first `width` exist only to replace those that end.
        for candidate, ending in zip(best[: self.params.width], endings, strict=False):
            if ending is not None:
                self.finished.append(self._finish(live[candidate.parent], candidate, ending, length))
        self.finished.sort(key=lambda beam: -beam.score)
        del self.finished[self.params.width :]
        survivors = survivors[: self.params.width]
        self.is_done = not survivors or not self._can_improve(survivors[0].score, length)
        return survivors

    def _best(self, live: list[Sequence], continuations: list[list[Continuation]]) -> list[Candidate]:
        candidates = [
            Candidate(parent, beam.score + token.logprob, token)
            for parent, (beam, tokens) in enumerate(zip(live, continuations, strict=True))
            for token in tokens
        ]
        candidates.sort(key=lambda candidate: (-candidate.score, candidate.parent, candidate.token.token_id))
        return candidates[: self.num_candidates]

    def _can_improve(self, best_running_score: float, length: int) -> bool:
        if len(self.finished) < self.params.width:
            return True
        if self.params.early_stopping is True:
            return False
        penalty = self.params.length_penalty
        if self.params.early_stopping == "never" and penalty > 0.0:
            length = self.max_tokens
        return best_running_score / float(length**penalty) > self.finished[-1].score

    def _finish(self, parent: Sequence, candidate: Candidate, ending: Ending, length: int) -> FinishedBeam:
        token = candidate.token
        return FinishedBeam(
            score=candidate.score / length**self.params.length_penalty,
            token_ids=[*parent.generated_token_ids, token.token_id],
            cumulative_logprob=parent.cumulative_logprob + token.raw_logprob,
            trail=None if token.alternatives is None else LogprobTrail(parent.trail, token.alternatives),
            ending=ending,
        )


def extend_beams(live: list[Sequence], survivors: list[Candidate]) -> list[Sequence]:
    """The next live beams, best first: a parent's best child takes over its blocks, further ones share them.

    History needs no copy of its own: each child is its parent's tokens and one more.
    """
    heirs = {candidate.parent: rank for rank, candidate in reversed(list(enumerate(survivors)))}
    places = iter(sorted(set(range(live[0].group.num_places)) - {live[parent].sample for parent in heirs}))
    children = [
        live[candidate.parent] if heirs[candidate.parent] == rank else live[candidate.parent].fork(next(places))
        for rank, candidate in enumerate(survivors)
    ]
    for child, (_, score, token) in zip(children, survivors, strict=True):
        child.score = score
        child.note(token.raw_logprob, token.alternatives)
        child.append(token.token_id)
    return children
