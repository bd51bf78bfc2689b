"""The Triton kernels of top_tokens and token_ranks; they begin where `sample`'s group kernel ends.

Legend: R rows, V vocabulary, G groups of GROUP neighbouring tokens, K tokens kept per row, C tokens asked for per row.
"""

from __future__ import annotations

from batchgen_kernels.launch import jit, tl
from batchgen_kernels.sample_math import is_finite, load_groups, row_logsumexp


@jit
def log_softmax_kernel(
    logits_ptr: tl.tensor,
    edited_ptr: tl.tensor,
    raw_sums_ptr: tl.tensor,
    vocabulary: int,
    num_groups: int,
    logits_stride: int,
    edited_stride: int,
    BLOCK_V: tl.constexpr,
    BLOCK_G: tl.constexpr,
) -> None:
    """Write the log-softmax of BLOCK_V logits of a row, for edits to act on."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = token < vocabulary
    raw = tl.load(logits_ptr + row * logits_stride + token, mask=inside, other=0.0).to(tl.float32)
    logprob = raw - row_logsumexp(raw_sums_ptr + row * num_groups, num_groups, BLOCK_G)
    tl.store(edited_ptr + row * edited_stride + token, logprob, mask=inside)


@jit
def top_kernel(
    logits_ptr: tl.tensor,
    edited_ptr: tl.tensor,
    raw_sums_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    best_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    logprobs_ptr: tl.tensor,
    count: int,
    vocabulary: int,
    num_groups: int,
    logits_stride: int,
    edited_stride: int,
    EDITED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
) -> None:
    """Take a row's `count` best tokens one by one: the best of the groups' best, which its group then replaces."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_G)
    tops = load_groups(tops_ptr + row * num_groups, num_groups, BLOCK_G)
    best = tl.load(best_ptr + row * num_groups + group, mask=group < num_groups, other=vocabulary)
    ok = is_finite(tl.max(tops, axis=0))
    logsum = row_logsumexp(raw_sums_ptr + row * num_groups, num_groups, BLOCK_G)
    for index in range(count):
        top = tl.max(tops, axis=0)
        token = tl.min(tl.where(tops == top, best, vocabulary), axis=0)
        token = tl.minimum(token, vocabulary - 1)
        logprob = tl.load(logits_ptr + row * logits_stride + token).to(tl.float32) - logsum
        score = logprob
        if EDITED:
            score = top
        out = row * count + index
        tl.store(token_ids_ptr + out, tl.where(ok, token, index).to(tl.int64))
        tl.store(scores_ptr + out, tl.where(ok, score, float("-inf")))
        tl.store(logprobs_ptr + out, tl.where(ok, logprob, float("-inf")))
        chosen = token // GROUP
        other = chosen * GROUP + tl.arange(0, GROUP)
        x = tl.load(edited_ptr + row * edited_stride + other, mask=other < vocabulary, other=float("-inf"))
        x = x.to(tl.float32)
        left = (other < vocabulary) & ((x < top) | ((x == top) & (other > token)))
        next_top = tl.max(tl.where(left, x, float("-inf")), axis=0)
        next_best = tl.min(tl.where(left & (x == next_top), other, vocabulary), axis=0)
        tops = tl.where(group == chosen, next_top, tops)
        best = tl.where(group == chosen, next_best, best)


@jit
def rank_kernel(
    logits_ptr: tl.tensor,
    raw_sums_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    asked_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    logprobs_ptr: tl.tensor,
    num_asked: int,
    vocabulary: int,
    num_groups: int,
    logits_stride: int,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
) -> None:
    """Rank one token of one row; tiles of groups whose best logit lies below the token's are not looked at."""
    row = tl.program_id(0).to(tl.int64)
    place = row * num_asked + tl.program_id(1)
    token = tl.load(asked_ptr + place)
    row_ptr = logits_ptr + row * logits_stride
    x = tl.load(row_ptr + token).to(tl.float32)
    before = tl.zeros((GROUP * GROUPS,), tl.int32)
    for first in range(0, num_groups, GROUPS):
        group = first + tl.arange(0, GROUPS)
        tops = tl.load(tops_ptr + row * num_groups + group, mask=group < num_groups, other=float("-inf"))
        if tl.max(tops, axis=0) >= x:
            other = first * GROUP + tl.arange(0, GROUP * GROUPS)
            y = tl.load(row_ptr + other, mask=other < vocabulary, other=float("-inf")).to(tl.float32)
            before += ((other < vocabulary) & ((y > x) | ((y == x) & (other < token)))).to(tl.int32)
    tl.store(ranks_ptr + place, (tl.sum(before, axis=0) + 1).to(tl.int64))
    logsum = row_logsumexp(raw_sums_ptr + row * num_groups, num_groups, BLOCK_G)
    tl.store(logprobs_ptr + place, x - logsum)
