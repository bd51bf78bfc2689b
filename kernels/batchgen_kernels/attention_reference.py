"""The torch reference of paged_attention, computed by the segment rule (`batchgen_kernels.segments`).

Legend: T query tokens, S sequences, H query heads, K KV heads, G = H / K, D head size (Dv of the values), N blocks,
B block size, P pairs (query token, segment), L = SEGMENT_TOKENS.
"""

from __future__ import annotations

from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from batchgen_kernels.attention_options import AttentionOptions
from batchgen_kernels.reduction import tree_sum
from batchgen_kernels.segments import SEGMENT_TOKENS, check_block_size

MAX_GATHERED_ELEMENTS = 1 << 22
"""How many elements of K (and of V) the reference gathers at a time."""


class _Pairs(NamedTuple):
    """All (query, segment) pairs of some queries, in order of query, then of segment."""

    query_P: Tensor
    segment_P: Tensor
    rank_P: Tensor
    """0 for the first segment that its query sees."""


class _Partials(NamedTuple):
    """Unmerged results of P pairs."""

    max_PH: Tensor
    sum_PH: Tensor
    out_PHD: Tensor


def _query_places(query_starts_S1: Tensor, context_lens_S: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return sequence_T and position_T of every query token."""
    starts = query_starts_S1.long()
    counts = starts[1:] - starts[:-1]
    sequence_T = torch.repeat_interleave(torch.arange(len(counts), device=starts.device), counts)
    ends_T = starts[1:][sequence_T]
    position_T = context_lens_S.long()[sequence_T] - ends_T + torch.arange(num_tokens, device=starts.device)
    return sequence_T, position_T


def _segments_in_sight(position_T: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """Return first_T and count_T of the segments that each query sees."""
    oldest = torch.zeros_like(position_T) if window is None else (position_T - window + 1).clamp(min=0)
    first = oldest // SEGMENT_TOKENS
    return first, position_T // SEGMENT_TOKENS - first + 1


def _pairs(first_T: Tensor, count_T: Tensor) -> _Pairs:
    query_P = torch.repeat_interleave(torch.arange(len(count_T), device=count_T.device), count_T)
    rank_P = torch.arange(len(query_P), device=count_T.device) - (count_T.cumsum(0) - count_T)[query_P]
    return _Pairs(query_P, first_T[query_P] + rank_P, rank_P)


def _gather(cache_NKBD: Tensor, scales_NKB: Tensor | None, blocks_PC: Tensor, in_context_PL: Tensor) -> Tensor:
    """Return the segments' keys or values as fp32 [P * K, L, D], zeros where the context does not reach."""
    num_pairs, (heads, _, size) = len(blocks_PC), cache_NKBD.shape[1:]
    x = cache_NKBD[blocks_PC].transpose(1, 2).reshape(num_pairs, heads, SEGMENT_TOKENS, size).float()
    if scales_NKB is not None:
        x = x * scales_NKB[blocks_PC].transpose(1, 2).reshape(num_pairs, heads, SEGMENT_TOKENS, 1)
    return torch.where(in_context_PL[:, None, :, None], x, 0.0).reshape(num_pairs * heads, SEGMENT_TOKENS, size)


def _merge(partials: _Partials, pairs: _Pairs, num_queries: int, sinks_H: Tensor | None) -> Tensor:
    """Merge partials in the order of their segments -> [num_queries, H, Dv]."""
    heads, size = partials.out_PHD.shape[1:]
    new = partials.max_PH.new_full
    ranks = [(pairs.rank_P == rank).nonzero().squeeze(1) for rank in range(int(pairs.rank_P.max()) + 1)]
    max_TH = new((num_queries, heads), float("-inf"))
    for chosen in ranks:
        queries = pairs.query_P[chosen]
        max_TH[queries] = torch.maximum(max_TH[queries], partials.max_PH[chosen])
    if sinks_H is not None:
        max_TH = torch.maximum(max_TH, sinks_H.float())
    weight_PH = torch.exp(partials.max_PH - max_TH[pairs.query_P])
    sum_TH, out_THD = new((num_queries, heads), 0.0), new((num_queries, heads, size), 0.0)
    for chosen in ranks:
        queries, weight = pairs.query_P[chosen], weight_PH[chosen]
        sum_TH[queries] += partials.sum_PH[chosen] * weight
        out_THD[queries] += partials.out_PHD[chosen] * weight.unsqueeze(-1)
    if sinks_H is not None:
        sum_TH = sum_TH + torch.exp(sinks_H.float() - max_TH)
    return out_THD / sum_TH.unsqueeze(-1)


class _Reference(NamedTuple):
    """The inputs that all chunks of one reference call share."""

    k_cache: Tensor
    v_cache: Tensor
    block_tables_SB: Tensor
    context_lens_S: Tensor
    k_scales: Tensor | None
    v_scales: Tensor | None
    scale: float
    window: int | None
    softcap: float | None

    def partials(self, q_THD: Tensor, sequence_T: Tensor, position_T: Tensor, pairs: _Pairs) -> _Partials:
        """Compute each pair by itself: every product of the batch has the same shape, so none sees its neighbours."""
        num_pairs, num_heads = len(pairs.query_P), q_THD.shape[1]
        sequence_P, position_P = sequence_T[pairs.query_P], position_T[pairs.query_P]
        key_PL = pairs.segment_P[:, None] * SEGMENT_TOKENS + torch.arange(SEGMENT_TOKENS, device=q_THD.device)
        in_context_PL = key_PL < self.context_lens_S[sequence_P, None]
        blocks_PC = self._blocks(sequence_P, pairs.segment_P)
        k = _gather(self.k_cache, self.k_scales, blocks_PC, in_context_PL)
        v = _gather(self.v_cache, self.v_scales, blocks_PC, in_context_PL)
        group = num_heads // self.k_cache.shape[1]
        q = q_THD[pairs.query_P].float().reshape(-1, group, q_THD.shape[-1])
        scores = torch.bmm(q, k.transpose(1, 2)).view(num_pairs, num_heads, SEGMENT_TOKENS) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        seen_PL = key_PL <= position_P[:, None]
        if self.window is not None:
            seen_PL &= key_PL > position_P[:, None] - self.window
        scores = scores.masked_fill(~seen_PL[:, None], float("-inf"))
        max_PH = scores.amax(-1)
        weights = torch.exp(scores - max_PH.unsqueeze(-1))
        out = torch.bmm(weights.view(-1, group, SEGMENT_TOKENS), v).view(num_pairs, num_heads, -1)
        return _Partials(max_PH, tree_sum(weights), out)

    def _blocks(self, sequence_P: Tensor, segment_P: Tensor) -> Tensor:
        """Return the blocks [P, L / B] of each segment; block 0 stands for those past the context."""
        per_segment = SEGMENT_TOKENS // self.k_cache.shape[2]
        index_PC = segment_P[:, None] * per_segment + torch.arange(per_segment, device=segment_P.device)
        width = self.block_tables_SB.shape[1]
        held = index_PC * self.k_cache.shape[2] < self.context_lens_S[sequence_P, None]
        return torch.where(held, self.block_tables_SB.long()[sequence_P[:, None], index_PC.clamp(max=width - 1)], 0)


def paged_attention_reference(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_SB: Tensor,
    query_starts_S1: Tensor,
    context_lens_S: Tensor,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """Attend in torch; see `paged_attention`. `prefixes` and `plan` change nothing here: the bits are the same."""
    check_block_size(k_cache.shape[2])
    num_tokens, num_heads = q_THD.shape[:2]
    out, window, sinks_H = options.get("out"), options.get("window"), options.get("sinks_H")
    if out is None:
        out = q_THD.new_empty(num_tokens, num_heads, v_cache.shape[-1])
    sequence_T, position_T = _query_places(query_starts_S1, context_lens_S, num_tokens)
    first_T, count_T = _segments_in_sight(position_T, window)
    inputs = _Reference(
        k_cache, v_cache, block_tables_SB, context_lens_S.long(), options.get("k_scales"), options.get("v_scales"),
        options["scale"], window, options.get("softcap"),
    )  # fmt: skip
    largest = max(k_cache.shape[-1], v_cache.shape[-1]) * SEGMENT_TOKENS * k_cache.shape[1]
    for begin, end in _chunks(count_T.tolist(), max(1, MAX_GATHERED_ELEMENTS // largest)):
        part = slice(begin, end)
        pairs = _pairs(first_T[part], count_T[part])
        partials = inputs.partials(q_THD[part], sequence_T[part], position_T[part], pairs)
        out[part] = _merge(partials, pairs, end - begin, sinks_H).to(out.dtype)
    return out


def _chunks(counts: list[int], most: int) -> list[tuple[int, int]]:
    """Cut the queries into runs of at most `most` pairs, one query at least."""
    chunks, begin, total = [], 0, 0
    for index, count in enumerate(counts):
        if total + count > most and index > begin:
            chunks.append((begin, index))
            begin, total = index, 0
        total += count
    return [*chunks, (begin, len(counts))] if counts else []
