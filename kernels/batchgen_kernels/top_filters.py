"""top-k, top-p and min-p as one threshold per row, so that nothing is sorted but a few candidates.

Legend: F filtered rows, V vocabulary, K candidates (the largest scores in falling order).
All three keep the tokens above some score, so together they are a threshold. top-k keeps every token that equals the
k-th; only top-p can cut through equal scores: it keeps as many as transformers' TopPLogitsWarper, whose unstable sort
leaves open which, and here they are the lowest ids. Each filter sees what the one before left: top-k, then top-p of the
renormalised rest, then min-p.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_CANDIDATES = 1024
"""Rows whose threshold lies deeper are sorted whole."""


class Filters(NamedTuple):
    """The filters of F rows with all defaults filled in."""

    top_k_F: Tensor
    """int64; V where off."""
    top_p_F: Tensor
    """fp32; 1 where off."""
    min_p_F: Tensor
    """fp32; 0 where off."""
    vocabulary: int

    @classmethod
    def of_rows(
        cls, top_k_R: Tensor | None, top_p_R: Tensor | None, min_p_R: Tensor | None, rows_F: Tensor, vocabulary: int
    ) -> Filters:
        """Take the filters of some rows; None stands for a filter that no row uses."""
        whole = torch.full_like(rows_F, vocabulary)
        top_k = whole if top_k_R is None else top_k_R.long()[rows_F]
        return cls(
            torch.where((top_k <= 0) | (top_k > vocabulary), whole, top_k),
            torch.ones(rows_F.shape, device=rows_F.device) if top_p_R is None else top_p_R.float()[rows_F],
            torch.zeros(rows_F.shape, device=rows_F.device) if min_p_R is None else min_p_R.float()[rows_F],
            vocabulary,
        )

    def select(self, rows: Tensor) -> Filters:
        """Return the filters of some of these rows."""
        return Filters(self.top_k_F[rows], self.top_p_F[rows], self.min_p_F[rows], self.vocabulary)

    def active(self) -> Tensor:
        """Return the indexes of rows that any filter can touch."""
        used = (self.top_k_F < self.vocabulary) | (self.top_p_F < 1) | (self.min_p_F > 0)
        return used.nonzero().squeeze(1)


class _Thresholds(NamedTuple):
    """Scores at or above `threshold_F` are kept, but only the `ties_kept_F` lowest ids of those equal to `tie_F`."""

    threshold_F: Tensor
    tie_F: Tensor
    ties_kept_F: Tensor
    found_F: Tensor
    """False where the candidates do not reach down to the threshold."""


def _thresholds(candidates_FK: Tensor, logsumexp_F: Tensor, filters: Filters) -> _Thresholds:
    num_candidates = candidates_FK.shape[1]
    top_F, last_F = candidates_FK[:, 0], candidates_FK[:, -1]
    use_k, use_p = filters.top_k_F < filters.vocabulary, filters.top_p_F < 1
    kth_F = candidates_FK.gather(1, (filters.top_k_F - 1).clamp(max=num_candidates - 1)[:, None]).squeeze(1)
    floor_F = torch.where(use_k, kth_F, -torch.inf)
    mass_FK = torch.exp(candidates_FK - top_F[:, None]).double().masked_fill(candidates_FK < floor_F[:, None], 0.0)
    through_FK = mass_FK.cumsum(1)
    total_F = torch.where(use_k, through_FK[:, -1], torch.exp(logsumexp_F - top_F).double())
    inside_FK = (through_FK - mass_FK < (filters.top_p_F.double() * total_F)[:, None]) & (mass_FK > 0)
    kept_F = inside_FK.sum(1).clamp(min=1)
    tie_F = torch.where(use_p, candidates_FK.gather(1, kept_F[:, None] - 1).squeeze(1), -torch.inf)
    ties_kept_F = kept_F - (candidates_FK > tie_F[:, None]).sum(1)
    deep_F = (use_k & ((filters.top_k_F > num_candidates) | (kth_F <= last_F))) | (use_p & (tie_F <= last_F))
    lowest_F = top_F + torch.log(filters.min_p_F)
    threshold_F = torch.maximum(torch.maximum(floor_F, lowest_F), tie_F)
    return _Thresholds(threshold_F, tie_F, ties_kept_F, ~deep_F | (num_candidates == filters.vocabulary))


def kept_tokens(y_FV: Tensor, logsumexp_F: Tensor, filters: Filters) -> Tensor:
    """Return which tokens of each row survive, bool [F, V], one at least; `logsumexp_F` is that of the whole rows."""
    largest = y_FV.topk(min(MAX_CANDIDATES, y_FV.shape[1]), dim=1).values
    found = _thresholds(largest, logsumexp_F, filters)
    deep = (~found.found_F).nonzero().squeeze(1)
    if len(deep):
        whole = y_FV[deep].sort(dim=1, descending=True).values
        for part, again in zip(found, _thresholds(whole, logsumexp_F[deep], filters.select(deep)), strict=True):
            part[deep] = again
    kept_FV = y_FV >= found.threshold_F[:, None]
    tied_FV = y_FV == found.tie_F[:, None]
    for row in (tied_FV.sum(1) > found.ties_kept_F).nonzero().squeeze(1).tolist():
        ids = tied_FV[row].nonzero().squeeze(1)
        kept_FV[row, ids[int(found.ties_kept_F[row]) :]] = False
    return kept_FV
