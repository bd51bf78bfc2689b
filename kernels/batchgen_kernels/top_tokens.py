"""top_tokens and token_ranks: the most likely tokens of each row, and where given tokens stand.

Legend: R rows, V vocabulary, K tokens kept per row, C tokens asked for per row.

    logprob = log_softmax(logits);  score = logprob after bias and penalties;  tokens in falling order, lowest id first
    rank    = 1 + the tokens that are more likely + those as likely with lower ids
So the rank of the i-th of top_tokens is i + 1. Edits act on log-probabilities, and what they leave is not normalised
again, as in transformers' beam search. No sort: the best tokens are taken one by one from the best of groups of 256,
one group being looked at anew for each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from batchgen_kernels.launch import Launch, next_power_of_2, runs_on_triton
from batchgen_kernels.sample import GROUPS_PER_TILE, SampleBuffers, SampleCall
from batchgen_kernels.sample_kernels import group_kernel
from batchgen_kernels.sample_types import GROUP_TOKENS, NO_EDITS, SampleParams, TokenRanks, TopTokens
from batchgen_kernels.top_kernels import log_softmax_kernel, rank_kernel, top_kernel
from batchgen_kernels.top_reference import token_ranks_reference, top_tokens_reference

__all__ = [
    "NO_EDITS",
    "TokenRanks",
    "TopTokens",
    "token_ranks",
    "token_ranks_launches",
    "token_ranks_reference",
    "token_ranks_triton",
    "top_tokens",
    "top_tokens_launches",
    "top_tokens_reference",
    "top_tokens_triton",
]

BLOCK_V = 4096
"""Logits per program of the log-softmax."""


def _padded(call: SampleCall) -> int:
    return max(16, next_power_of_2(call.buffers.tops_RG.shape[1]))


def _group_launch(call: SampleCall, *, edited: bool) -> Launch:
    """Describe the launch that finds each group's log-sum-exp, and its best (edited) logit."""
    constants = {"SAME": not edited, "APART": False, "TEMPERATURE": False, "GROUP": GROUP_TOKENS}
    num_rows, num_groups = call.buffers.tops_RG.shape
    grid = (num_rows, -(-num_groups // GROUPS_PER_TILE))
    return call.launch(group_kernel, grid, constants | {"BLOCK_G": GROUPS_PER_TILE}, 4)


def _top_launch(call: SampleCall, found: TopTokens, *, edited: bool) -> Launch:
    constants = {"EDITED": edited, "GROUP": GROUP_TOKENS, "BLOCK_G": _padded(call)}
    num_rows, count = found.token_ids_RK.shape
    launch = call.launch(top_kernel, (num_rows if count else 0,), constants, 4)
    token_ids, scores, logprobs = found
    launch.arguments.update(token_ids_ptr=token_ids, scores_ptr=scores, logprobs_ptr=logprobs, count=count)
    return launch


def _call(logits_RV: Tensor, edits: SampleParams) -> SampleCall:
    unused = logits_RV.new_empty((0, 5), dtype=torch.int64)
    return SampleCall(logits_RV, edits, unused, SampleBuffers.allocate(logits_RV, edits))


def _empty_top(logits_RV: Tensor, count: int) -> TopTokens:
    shape = (len(logits_RV), min(count, logits_RV.shape[1]))
    dtypes = (torch.int64, torch.float32, torch.float32)
    return TopTokens(*(logits_RV.new_empty(shape, dtype=dtype) for dtype in dtypes))


def top_tokens_launches(logits_RV: Tensor, edits: SampleParams, found: TopTokens) -> list[Launch]:
    """Describe the launches of one call, in order; rows of the logits may be strided, their tokens not."""
    call = _call(logits_RV, edits)
    edited = call.buffers.edited_RV is not logits_RV
    launches = [_group_launch(call, edited=False)]
    if edited:
        grid = (len(logits_RV), -(-logits_RV.shape[1] // BLOCK_V))
        constants: dict[str, Any] = {"BLOCK_V": BLOCK_V, "BLOCK_G": _padded(call)}
        launches += [call.launch(log_softmax_kernel, grid, constants, 4), *call.edits()]
        launches.append(_group_launch(call, edited=True))
    return [*launches, _top_launch(call, found, edited=edited)]


def token_ranks_launches(logits_RV: Tensor, token_ids_RC: Tensor, found: TokenRanks) -> list[Launch]:
    """Describe the launches of one call, in order; `token_ids_RC` must be contiguous."""
    call = _call(logits_RV, NO_EDITS)
    num_rows, num_asked = token_ids_RC.shape
    constants = {"GROUP": GROUP_TOKENS, "GROUPS": GROUPS_PER_TILE, "BLOCK_G": _padded(call)}
    rank = call.launch(rank_kernel, (num_rows, num_asked), constants, 4)
    rank.arguments.update(
        asked_ptr=token_ids_RC, ranks_ptr=found.ranks_RC, logprobs_ptr=found.logprobs_RC, num_asked=num_asked
    )
    best = TopTokens(found.best_ids_RK, torch.empty_like(found.best_logprobs_RK), found.best_logprobs_RK)
    return [_group_launch(call, edited=False), rank, _top_launch(call, best, edited=False)]


def top_tokens_triton(logits_RV: Tensor, count: int, edits: SampleParams = NO_EDITS) -> TopTokens:
    """Find by the Triton kernels; see `top_tokens`."""
    found = _empty_top(logits_RV, count)
    for launch in top_tokens_launches(logits_RV, edits, found):
        launch.run()
    return found


def token_ranks_triton(logits_RV: Tensor, token_ids_RC: Tensor, count: int = 0) -> TokenRanks:
    """Rank by the Triton kernels; see `token_ranks`."""
    token_ids_RC = token_ids_RC.long().contiguous()
    best_ids, _, best_logprobs = _empty_top(logits_RV, count)
    logprobs = token_ids_RC.new_empty(token_ids_RC.shape, dtype=torch.float32)
    found = TokenRanks(logprobs, torch.empty_like(token_ids_RC), best_ids, best_logprobs)
    for launch in token_ranks_launches(logits_RV, token_ids_RC, found):
        launch.run()
    return found


def top_tokens(logits_RV: Tensor, count: int, edits: SampleParams = NO_EDITS) -> TopTokens:
    """Find the `count` (at most V) best tokens of each row; of `edits` bias and penalties alone are read."""
    return (top_tokens_triton if runs_on_triton(logits_RV) else top_tokens_reference)(logits_RV, count, edits)


def token_ranks(logits_RV: Tensor, token_ids_RC: Tensor, count: int = 0) -> TokenRanks:
    """Find log-probability and rank of the given tokens of each row, and its `count` best tokens."""
    return (token_ranks_triton if runs_on_triton(logits_RV) else token_ranks_reference)(logits_RV, token_ids_RC, count)
