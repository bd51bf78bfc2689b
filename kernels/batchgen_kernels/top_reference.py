"""The torch references of top_tokens and token_ranks. Legend: R rows, V vocabulary, K and C tokens per row."""

from __future__ import annotations

import torch
from torch import Tensor

from batchgen_kernels.sample_reference import edit_logits, log_normalizer
from batchgen_kernels.sample_types import NO_EDITS, SampleParams, TokenRanks, TopTokens


def _ordered(scores_RV: Tensor) -> Tensor:
    """int64 keys that order as the scores do, equal ones by falling id: no two of a row are equal."""
    bits = (scores_RV + 0.0).view(torch.int32).long()
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (keys << 32) - torch.arange(scores_RV.shape[1], device=scores_RV.device)


def top_tokens_reference(logits_RV: Tensor, count: int, edits: SampleParams = NO_EDITS) -> TopTokens:
    """Find in torch; see `batchgen_kernels.top_tokens.top_tokens`."""
    raw_RV = logits_RV.float()
    normalizer_R1 = log_normalizer(raw_RV)[:, None]
    has_edits = edits.bias is not None or edits.counts is not None
    edited_RV = edit_logits(raw_RV - normalizer_R1, edits) if has_edits else raw_RV
    ids_RK = _ordered(edited_RV).topk(min(count, logits_RV.shape[1]), dim=1).indices
    logprobs_RK = raw_RV.gather(1, ids_RK) - normalizer_R1
    scores_RK = edited_RV.gather(1, ids_RK) if has_edits else logprobs_RK
    # As in torch.amax, a NaN wins.
    spoiled_R1 = ~edited_RV.amax(1, keepdim=True).isfinite()
    return TopTokens(
        torch.where(spoiled_R1, torch.arange(ids_RK.shape[1], device=ids_RK.device), ids_RK),
        torch.where(spoiled_R1, -torch.inf, scores_RK),
        torch.where(spoiled_R1, -torch.inf, logprobs_RK),
    )


def token_ranks_reference(logits_RV: Tensor, token_ids_RC: Tensor, count: int = 0) -> TokenRanks:
    """Rank in torch; see `batchgen_kernels.top_tokens.token_ranks`."""
    raw_RV = logits_RV.float()
    raw_RC = raw_RV.gather(1, token_ids_RC)
    ids_V = torch.arange(raw_RV.shape[1], device=raw_RV.device)
    ranks = []
    for raw_R, ids_R in zip(raw_RC.unbind(1), token_ids_RC.unbind(1), strict=True):
        before_RV = (raw_RV == raw_R[:, None]) & (ids_V < ids_R[:, None])
        ranks.append((before_RV | (raw_RV > raw_R[:, None])).sum(1) + 1)
    ranks_RC = torch.stack(ranks, dim=1) if ranks else token_ids_RC.new_empty(token_ids_RC.shape)
    best = top_tokens_reference(logits_RV, count)
    return TokenRanks(raw_RC - log_normalizer(raw_RV)[:, None], ranks_RC, best.token_ids_RK, best.logprobs_RK)
