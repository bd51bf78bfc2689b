"""Draws one token for every sequence that a step brought to its last token, and ranks tokens for beams and logprobs.

Shapes: L logits rows of the step, R draws (several may share a logits row), V vocabulary, K tokens kept per row.
"""

from __future__ import annotations

import torch
from batchgen_kernels.sample import sample
from batchgen_kernels.sample_reference import edit_logits, log_normalizer

from batchgen.engine.batch import Draw
from batchgen.engine.beam import Continuation
from batchgen.engine.sample_columns import edit_params, sample_params
from batchgen.engine.sequence import Sequence
from batchgen.records import TokenLogprob


class Sampler:
    """Turns logits into tokens; what it does for a row depends on that row's logits, parameters and key alone."""

    def sample(self, logits_LV: torch.Tensor, rows: list[int], sequences: list[Sequence]) -> list[Draw]:
        """Draw for each sequence from the logits row beside it."""
        if not sequences:
            return []
        logits_RV = _rows(logits_LV, rows)
        result = sample(logits_RV, sample_params(sequences, logits_LV.device), _keys(sequences, logits_LV.device))
        token_ids = result.token_ids_R.tolist()
        alternatives = _alternatives(
            logits_RV, [[token_id] for token_id in token_ids], [s.group.params.logprobs for s in sequences]
        )
        return [
            Draw(token_id, logprob, ok, None if ranked is None else ranked[0])
            for token_id, logprob, ok, ranked in zip(
                token_ids, result.logprobs_R.tolist(), result.ok_R.tolist(), alternatives, strict=True
            )
        ]

    def continuations(
        self, logits_LV: torch.Tensor, rows: list[int], beams: list[Sequence]
    ) -> list[list[Continuation]]:
        """For each live beam the best next tokens, as many as its search may need, best first; banned ones left out."""
        if not beams:
            return []
        raw_RV = _rows(logits_LV, rows).float().log_softmax(-1)
        # As in transformers, processors act on log-probabilities, and what they leave is not normalised again.
        edited_RV = edit_logits(raw_RV, edit_params(beams, logits_LV.device))
        counts = [0 if beam.group.search is None else beam.group.search.num_candidates for beam in beams]
        values_RK, ids_RK = edited_RV.topk(min(max(counts), edited_RV.shape[1]))
        raw_RK = raw_RV.gather(1, ids_RK)
        token_ids = [ids[:count] for ids, count in zip(ids_RK.tolist(), counts, strict=True)]
        alternatives = _alternatives(raw_RV, token_ids, [beam.group.params.logprobs for beam in beams])
        return [
            [
                Continuation(token_id, value, raw, None if ranked is None else ranked[index])
                for index, (token_id, value, raw) in enumerate(zip(ids, values, raws, strict=False))
                if value > float("-inf")
            ]
            for ids, values, raws, ranked in zip(
                token_ids, values_RK.tolist(), raw_RK.tolist(), alternatives, strict=True
            )
        ]

    def score(self, logits_RV: torch.Tensor, token_ids: list[int], top: int) -> list[list[TokenLogprob]]:
        """Log-probability and rank of the token that really followed each row, and of the `top` most likely ones."""
        ranked = _alternatives(logits_RV, [[token_id] for token_id in token_ids], [top] * len(token_ids))
        return [row[0] for row in ranked if row is not None]


def _rows(logits_LV: torch.Tensor, rows: list[int]) -> torch.Tensor:
    # Most steps use every row once, in order; then nothing is gathered.
    if rows == list(range(len(logits_LV))):
        return logits_LV
    return logits_LV[torch.tensor(rows, device=logits_LV.device)]


def _keys(sequences: list[Sequence], device: torch.device) -> torch.Tensor:
    """int64 [R, 5]: seed, source, row, sample, position; position counts the generated tokens."""
    keys = [(s.group.seed, s.group.source, s.group.row, s.sample, s.num_generated) for s in sequences]
    return torch.tensor(keys, dtype=torch.int64, device=device)


def _alternatives(
    logits_RV: torch.Tensor, token_ids: list[list[int]], tops: list[int | None]
) -> list[list[list[TokenLogprob]] | None]:
    """Per row and per given token: that token, then the most likely others; None for rows whose `tops` is None.

    Log-probabilities are raw. Ranks count the tokens that are more likely, from 1.
    """
    result: list[list[list[TokenLogprob]] | None] = [None] * len(tops)
    wanted = [row for row, top in enumerate(tops) if top is not None]
    if not wanted:
        return result
    scores_WV = logits_RV[torch.tensor(wanted, device=logits_RV.device)].float()
    scores_WV = scores_WV - log_normalizer(scores_WV)[:, None]
    most = min(max(top for top in tops if top is not None), scores_WV.shape[1])
    values_WK, ids_WK = scores_WV.topk(most)
    for index, row in enumerate(wanted):
        given = torch.tensor(token_ids[row], dtype=torch.int64, device=logits_RV.device)
        values = scores_WV[index][given]
        ranks = (scores_WV[index][None, :] > values[:, None]).sum(-1) + 1
        count = tops[row] or 0
        best = [
            TokenLogprob(token_id, value, rank + 1)
            for rank, (token_id, value) in enumerate(
                zip(ids_WK[index, :count].tolist(), values_WK[index, :count].tolist(), strict=True)
            )
        ]
        result[row] = [
            [TokenLogprob(token_id, value, rank), *(other for other in best if other.token_id != token_id)]
            for token_id, value, rank in zip(token_ids[row], values.tolist(), ranks.tolist(), strict=True)
        ]
    return result
