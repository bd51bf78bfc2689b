"""Draws one token for every sequence that a step brought to its last token, and ranks tokens for beams and logprobs.

Shapes: L logits rows of the step, R draws (several may share a logits row), V vocabulary, C tokens asked for per row.
"""

from __future__ import annotations

import torch

from batchgen.engine.batch import Draw
from batchgen.engine.beam import Continuation
from batchgen.engine.masks import AllowedTokens
from batchgen.engine.ops import REFERENCE, Ops
from batchgen.engine.sample_columns import edit_params, keys_of, sample_params
from batchgen.engine.sequence import Sequence
from batchgen.records import TokenLogprob


class Sampler:
    """Turns logits into tokens; what it does for a row depends on that row's logits, parameters and key alone."""

    def __init__(self, ops: Ops = REFERENCE) -> None:
        self._ops = ops

    def sample(
        self,
        logits_LV: torch.Tensor,
        rows: list[int],
        sequences: list[Sequence],
        allowed: AllowedTokens | None = None,
    ) -> list[Draw]:
        """Draw for each sequence from the logits row beside it, and from what grammars allow."""
        if not sequences:
            return []
        logits_RV = _rows(logits_LV, rows)
        device = logits_LV.device
        params, keys = sample_params(sequences, device), keys_of(sequences, device)
        result = self._ops.sample(logits_RV if allowed is None else _masked(logits_RV, allowed), params, keys)
        if allowed is not None:
            result = result._replace(logprobs_R=self._raw_logprobs(logits_RV, result.token_ids_R))
        alternatives = self._alternatives(
            logits_RV, result.token_ids_R[:, None], [sequence.group.params.logprobs for sequence in sequences]
        )
        return [
            Draw(token_id, logprob, ok, None if ranked is None else ranked[0])
            for token_id, logprob, ok, ranked in zip(
                result.token_ids_R.tolist(), result.logprobs_R.tolist(), result.ok_R.tolist(), alternatives, strict=True
            )
        ]

    def continuations(
        self, logits_LV: torch.Tensor, rows: list[int], beams: list[Sequence]
    ) -> list[list[Continuation]]:
        """For each live beam the best next tokens, as many as its search may need, best first; banned ones left out."""
        if not beams:
            return []
        logits_RV = _rows(logits_LV, rows)
        counts = [0 if beam.group.search is None else beam.group.search.num_candidates for beam in beams]
        found = self._ops.top_tokens(logits_RV, max(counts), edit_params(beams, logits_LV.device))
        alternatives = self._alternatives(logits_RV, found.token_ids_RK, [beam.group.params.logprobs for beam in beams])
        return [
            [
                Continuation(token_id, score, logprob, None if ranked is None else ranked[index])
                for index, (token_id, score, logprob) in enumerate(zip(ids[:count], scores, logprobs, strict=False))
                if score > float("-inf")
            ]
            for count, ids, scores, logprobs, ranked in zip(
                counts,
                found.token_ids_RK.tolist(),
                found.scores_RK.tolist(),
                found.logprobs_RK.tolist(),
                alternatives,
                strict=True,
            )
        ]

    def score(self, logits_RV: torch.Tensor, token_ids: list[int], top: int) -> list[list[TokenLogprob]]:
        """Log-probability and rank of the token that really followed each row, and of the `top` most likely ones."""
        ids_R1 = torch.tensor(token_ids, dtype=torch.int64, device=logits_RV.device)[:, None]
        ranked = self._alternatives(logits_RV, ids_R1, [top] * len(token_ids))
        return [row[0] for row in ranked if row is not None]

    def _raw_logprobs(self, logits_RV: torch.Tensor, token_ids_R: torch.Tensor) -> torch.Tensor:
        """What the tokens have among all, not among those that grammars allow."""
        return self._ops.token_ranks(logits_RV, token_ids_R[:, None], 0).logprobs_RC[:, 0]

    def _alternatives(
        self, logits_RV: torch.Tensor, token_ids_RC: torch.Tensor, tops: list[int | None]
    ) -> list[list[list[TokenLogprob]] | None]:
        """Per row and per given token: that token, then the most likely others; None for rows whose `tops` is None.

        Log-probabilities are raw; ranks are places in the order of likelihood, of equal tokens the lowest id first.
        """
        wanted = [(row, top) for row, top in enumerate(tops) if top is not None]
        result: list[list[list[TokenLogprob]] | None] = [None] * len(tops)
        if not wanted:
            return result
        rows = [row for row, _ in wanted]
        logits_WV, ids_WC = _rows(logits_RV, rows), _rows(token_ids_RC, rows)
        columns = (ids_WC, *self._ops.token_ranks(logits_WV, ids_WC, max(top for _, top in wanted)))
        for (row, top), ids, logprobs, ranks, best_ids, best_logprobs in zip(
            wanted, *(column.tolist() for column in columns), strict=True
        ):
            others = [
                TokenLogprob(token_id, logprob, index + 1)
                for index, (token_id, logprob) in enumerate(zip(best_ids[:top], best_logprobs, strict=False))
            ]
            result[row] = [
                [entry, *(other for other in others if other.token_id != entry.token_id)]
                for entry in map(TokenLogprob, ids, logprobs, ranks)
            ]
        return result


def _masked(logits_RV: torch.Tensor, allowed: AllowedTokens) -> torch.Tensor:
    """A copy of the logits with -inf for what is not allowed."""
    banned_CV = allowed.banned_CV.to(logits_RV.device, non_blocking=True)
    if len(allowed.rows_C) == len(logits_RV):
        return logits_RV.masked_fill(banned_CV, -torch.inf)
    rows_C = torch.tensor(allowed.rows_C, device=logits_RV.device)
    masked_RV = logits_RV.clone()
    masked_RV[rows_C] = logits_RV[rows_C].masked_fill(banned_CV, -torch.inf)
    return masked_RV


def _rows(x_LV: torch.Tensor, rows: list[int]) -> torch.Tensor:
    # Most steps use every row once, in order; then nothing is gathered.
    if rows == list(range(len(x_LV))):
        return x_LV
    return x_LV[torch.tensor(rows, device=x_LV.device)]
