"""Draws one token for every sequence that a step brought to its last token, and ranks tokens for beams and logprobs.

Shapes: L logits rows of the step, R draws (several may share a logits row), V vocabulary, C tokens asked for per row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from batchgen.engine.batch import Draw
from batchgen.engine.beam import Continuation
from batchgen.engine.device import PROCESSOR, Device
from batchgen.engine.masks import AllowedTokens
from batchgen.engine.ops import REFERENCE, Ops
from batchgen.engine.sample_columns import SamplingColumns, edit_params
from batchgen.engine.sequence import Sequence
from batchgen.records import TokenLogprob


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The draws of one step, on their way to the host."""

    token_ids: torch.Tensor
    """int64 [R], on the device."""
    fetch: Callable[[], list[torch.Tensor]]
    """Waits for ids, log-probabilities, whether there was a token to draw, and what `Sampler._rank` found."""
    tops: list[int | None]
    """Per draw: how many other tokens are wanted with it; None: no log-probabilities."""

    def read(self) -> list[Draw]:
        """Wait for the draws."""
        token_ids, logprobs, ok, *ranks = (column.tolist() for column in self.fetch())
        alternatives = _alternatives(self.tops, ranks)
        return [
            Draw(token_id, logprob, is_ok, None if ranked is None else ranked[0])
            for token_id, logprob, is_ok, ranked in zip(token_ids, logprobs, ok, alternatives, strict=True)
        ]


_NO_COLUMN = torch.empty(0, dtype=torch.int64)
NO_DRAWS = SampledTokens(_NO_COLUMN, lambda: [_NO_COLUMN] * 3, [])


class Sampler:
    """Turns logits into tokens; what it does for a row depends on that row's logits, parameters and key alone."""

    def __init__(self, ops: Ops = REFERENCE, device: Device = PROCESSOR) -> None:
        self._ops = ops
        self._device = device
        self._columns = SamplingColumns(ops, device)

    def sample(
        self,
        logits_LV: torch.Tensor,
        rows: list[int],
        sequences: list[Sequence],
        allowed: AllowedTokens | None = None,
    ) -> SampledTokens:
        """Draw for each sequence from the logits row beside it, and from what grammars allow.

        Nothing waits for the device.
        """
        if not sequences:
            return NO_DRAWS
        logits_RV = self._rows(logits_LV, rows)
        masked_RV = logits_RV if allowed is None else self._masked(logits_RV, allowed)
        draws = self._columns.of(sequences)
        result = draws.sample(masked_RV)
        if allowed is not None:
            result = result._replace(logprobs_R=self._raw_logprobs(logits_RV, result.token_ids_R))
        ranks = self._rank(logits_RV, result.token_ids_R, draws.tops)
        return SampledTokens(result.token_ids_R, self._device.fetch(*result, *ranks), draws.tops)

    def continuations(
        self, logits_LV: torch.Tensor, rows: list[int], beams: list[Sequence]
    ) -> list[list[Continuation]]:
        """For each live beam the best next tokens, as many as its search may need, best first; banned ones left out."""
        if not beams:
            return []
        logits_RV = self._rows(logits_LV, rows)
        counts = [0 if beam.group.search is None else beam.group.search.num_candidates for beam in beams]
        found = self._ops.top_tokens(logits_RV, max(counts), edit_params(beams, self._device))
        tops = [beam.group.params.logprobs for beam in beams]
        fetch = self._device.fetch(*found, *self._rank(logits_RV, found.token_ids_RK, tops))
        token_ids, scores, logprobs, *ranks = (column.tolist() for column in fetch())
        return [
            [
                Continuation(token_id, score, logprob, None if ranked is None else ranked[index])
                for index, (token_id, score, logprob) in enumerate(zip(*columns, strict=False))
                if score > float("-inf") and index < count
            ]
            for count, ranked, *columns in zip(
                counts, _alternatives(tops, ranks), token_ids, scores, logprobs, strict=True
            )
        ]

    def score(self, logits_RV: torch.Tensor, token_ids: list[int], top: int) -> list[list[TokenLogprob]]:
        """Log-probability and rank of the token that really followed each row, and of the `top` most likely ones."""
        tops: list[int | None] = [top] * len(token_ids)
        ids_R = self._device.upload(np.array(token_ids, np.int64))[0]
        ranks = self._device.fetch(*self._rank(logits_RV, ids_R, tops))()
        return [row[0] for row in _alternatives(tops, [column.tolist() for column in ranks]) if row is not None]

    def _raw_logprobs(self, logits_RV: torch.Tensor, token_ids_R: torch.Tensor) -> torch.Tensor:
        """What the tokens have among all, not among those that grammars allow."""
        return self._ops.token_ranks(logits_RV, token_ids_R[:, None], 0).logprobs_RC[:, 0]

    def _masked(self, logits_RV: torch.Tensor, allowed: AllowedTokens) -> torch.Tensor:
        """A copy of the logits with -inf for what is not allowed."""
        banned_CV, rows_C = self._device.upload(allowed.banned_CV, np.array(allowed.rows_C, np.int64))
        if len(allowed.rows_C) == len(logits_RV):
            return logits_RV.masked_fill(banned_CV, -torch.inf)
        masked_RV = logits_RV.clone()
        masked_RV[rows_C] = logits_RV[rows_C].masked_fill(banned_CV, -torch.inf)
        return masked_RV

    def _rank(
        self, logits_RV: torch.Tensor, token_ids: torch.Tensor, tops: list[int | None]
    ) -> tuple[torch.Tensor, ...]:
        """What `_alternatives` makes entries of: the given ids, the columns of TokenRanks; () if none is wanted.

        `token_ids` [R, C], or [R] for one of each row.
        """
        wanted = [(row, top) for row, top in enumerate(tops) if top is not None]
        if not wanted:
            return ()
        rows = [row for row, _ in wanted]
        token_ids_RC = token_ids if token_ids.dim() == 2 else token_ids[:, None]
        logits_WV, ids_WC = self._rows(logits_RV, rows), self._rows(token_ids_RC, rows)
        return (ids_WC, *self._ops.token_ranks(logits_WV, ids_WC, max(top for _, top in wanted)))

    def _rows(self, x_LV: torch.Tensor, rows: list[int]) -> torch.Tensor:
        # Most steps use every row once, in order; then nothing is gathered.
        if rows == list(range(len(x_LV))):
            return x_LV
        return x_LV[self._device.upload(np.array(rows, np.int64))[0]]


def _alternatives(tops: list[int | None], ranks: list[list[list[float]]]) -> list[list[list[TokenLogprob]] | None]:
    """Per row and per given token: that token, then the most likely others; None for rows whose `tops` is None.

    `ranks` is what `_rank` found. Log-probabilities are raw; ranks are places in the order of likelihood, of equal
    tokens the lowest id first.
    """
    wanted = [(row, top) for row, top in enumerate(tops) if top is not None]
    result: list[list[list[TokenLogprob]] | None] = [None] * len(tops)
    if not wanted:
        return result
    for (row, top), ids, logprobs, places, best_ids, best_logprobs in zip(wanted, *ranks, strict=True):
        others = [
            TokenLogprob(int(token_id), logprob, index + 1)
            for index, (token_id, logprob) in enumerate(zip(best_ids[:top], best_logprobs, strict=False))
        ]
        result[row] = [
            [entry, *(other for other in others if other.token_id != entry.token_id)]
            for entry in (
                TokenLogprob(int(token_id), logprob, int(place))
                for token_id, logprob, place in zip(ids, logprobs, places, strict=True)
            )
        ]
    return result
