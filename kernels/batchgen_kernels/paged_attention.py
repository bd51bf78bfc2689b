"""paged_attention: causal attention of new tokens over the paged KV cache.

Legend: T query tokens, S sequences, H query heads, K KV heads, D head size (Dv of the values), N blocks, B block size.

    score = scale * q . k;  with softcap c: c * tanh(score / c)
    out   = sum_j exp(score_j - m) v_j / (sum_j exp(score_j - m) + exp(sink - m))        over the keys in sight
Query i of a sequence stands at position context_len - num_queries + i and sees the keys up to there, of these the last
`window` ones. Accumulated in fp32. Kwon et al., https://arxiv.org/abs/2309.06180; Dao, https://arxiv.org/abs/2307.08691.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from batchgen_kernels.attention_kernels import decode_kernel, merge_kernel, prefill_kernel, prefix_kernel
from batchgen_kernels.attention_options import AttentionOptions
from batchgen_kernels.attention_plan import SPLIT_TOKENS, AttentionPlan, plan_attention, tile_shape
from batchgen_kernels.attention_reference import paged_attention_reference
from batchgen_kernels.attention_tile import AttentionConfig
from batchgen_kernels.launch import INTERPRETED, Launch, check_fp8, next_power_of_2, num_processors, runs_on_triton
from batchgen_kernels.segments import check_block_size
from batchgen_kernels.store_kv import QUANTIZED_MAX

__all__ = ["paged_attention", "paged_attention_launches", "paged_attention_reference", "paged_attention_triton"]

PROGRAMS_PER_PROCESSOR = 3
"""Decode programs per multiprocessor: as many as its registers hold for heads of 128."""


class AttentionCall(NamedTuple):
    """The tensors and settings of one call, as `paged_attention` describes them."""

    q_THD: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables_SB: Tensor
    query_starts_S1: Tensor
    context_lens_S: Tensor
    out_THD: Tensor
    scale: float
    window: int | None
    softcap: float | None
    sinks_H: Tensor | None
    k_scales: Tensor | None
    v_scales: Tensor | None

    def config(self, rows: int, plan: AttentionPlan, split: int) -> AttentionConfig:
        """What a kernel with tiles of `rows` is compiled for."""
        k_dim, v_dim = self.k_cache.shape[3], self.v_cache.shape[3]
        return AttentionConfig(
            num_heads=self.q_THD.shape[1],
            num_kv_heads=self.k_cache.shape[1],
            block_size=self.k_cache.shape[2],
            k_dim=k_dim,
            v_dim=v_dim,
            padded_k=max(16, next_power_of_2(k_dim)),
            padded_v=max(16, next_power_of_2(v_dim)),
            rows=rows,
            keys=plan.shape.keys,
            split=split,
            softcap=self.softcap is not None,
            window=self.window is not None,
            sinks=self.sinks_H is not None,
            quantized=self.k_cache.dtype in QUANTIZED_MAX,
            interpreted=INTERPRETED,
        )

    def arguments(self, kernel: Any, plan: AttentionPlan, items: Tensor, partials: Sequence[Tensor]) -> dict[str, Any]:
        """Those of all arguments that `kernel` takes."""
        known: dict[str, Any] = {
            "q_ptr": self.q_THD,
            "k_ptr": self.k_cache,
            "v_ptr": self.v_cache,
            "k_scales_ptr": self.q_THD if self.k_scales is None else self.k_scales,
            "v_scales_ptr": self.q_THD if self.v_scales is None else self.v_scales,
            "tables_ptr": self.block_tables_SB,
            "query_starts_ptr": self.query_starts_S1,
            "contexts_ptr": self.context_lens_S,
            "sinks_ptr": self.q_THD if self.sinks_H is None else self.sinks_H,
            "out_ptr": self.out_THD,
            "partial_out_ptr": partials[0],
            "partial_stats_ptr": partials[1],
            "counts_ptr": plan.counts_4,
            "slot_starts_ptr": plan.slot_starts_S,
            "items_ptr": items,
            "sequences_ptr": plan.decode_sequences_C,
            "members_ptr": plan.members_M,
            "table_width": self.block_tables_SB.stride(0),
            "softcap_scale": 0.0 if self.softcap is None else self.scale / self.softcap,
            "factor": (self.scale if self.softcap is None else self.softcap) / math.log(2.0),
            "window": 0 if self.window is None else self.window,
        }
        return {name: known[name] for name in kernel.arg_names if name in known}


def _split_launches(call: AttentionCall, plan: AttentionPlan, num_programs: int) -> list[Launch]:
    """Describe the launches of the decodes: shared prefixes, own splits, merge."""
    num_heads, v_dim = call.out_THD.shape[1:]
    partial_out = call.q_THD.new_empty((plan.num_slots, num_heads, v_dim), dtype=torch.float32)
    partials = (partial_out, call.q_THD.new_empty((plan.num_slots, num_heads, 2), dtype=torch.float32))
    kv_heads = call.k_cache.shape[1]
    launches = []
    if num_prefix := len(plan.prefix_items_Y3):
        config = call.config(plan.shape.prefix_rows, plan, SPLIT_TOKENS)
        arguments = call.arguments(prefix_kernel, plan, plan.prefix_items_Y3, partials)
        launches.append(Launch(prefix_kernel, (num_prefix, kv_heads), arguments, {"C": config}, num_stages=3))
    config = call.config(plan.shape.decode_rows, plan, SPLIT_TOKENS)
    arguments = call.arguments(decode_kernel, plan, plan.decode_items_W2, partials)
    grid = (min(num_programs, len(plan.decode_items_W2) * kv_heads),)
    launches.append(Launch(decode_kernel, grid, arguments, {"C": config}, num_stages=3))
    merged = call.config(plan.shape.group, plan, SPLIT_TOKENS)
    rows = next_power_of_2(min(num_heads, 4))
    arguments = call.arguments(merge_kernel, plan, plan.decode_items_W2, partials)
    grid_2 = (len(plan.decode_sequences_C), -(-num_heads // rows))
    launches.append(Launch(merge_kernel, grid_2, arguments, {"C": replace(merged, rows=rows)}, num_warps=2))
    return launches


def paged_attention_launches(call: AttentionCall, plan: AttentionPlan, num_programs: int) -> list[Launch]:
    """Describe the launches of one call, in order; q and the caches must be contiguous."""
    launches = _split_launches(call, plan, num_programs) if len(plan.decode_sequences_C) else []
    if num_tiles := len(plan.prefill_items_X2):
        rows = plan.shape.prefill_rows
        config = call.config(rows, plan, SPLIT_TOKENS if plan.shape.deterministic else 0)
        arguments = call.arguments(prefill_kernel, plan, plan.prefill_items_X2, (call.out_THD, call.out_THD))
        grid = (num_tiles, call.k_cache.shape[1])
        num_warps = 8 if rows >= 128 or max(config.padded_k, config.padded_v) > 128 else 4
        launches.append(Launch(prefill_kernel, grid, arguments, {"C": config}, num_warps=num_warps, num_stages=3))
    return launches


def paged_attention_triton(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_SB: Tensor,
    query_starts_S1: Tensor,
    context_lens_S: Tensor,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """Attend by the Triton kernels; see `paged_attention`."""
    check_block_size(k_cache.shape[2])
    check_fp8(k_cache)
    num_tokens, num_heads, head_dim = q_THD.shape
    plan, out = options.get("plan"), options.get("out")
    if plan is None:
        shape = tile_shape(num_heads, k_cache.shape[1], max(head_dim, v_cache.shape[3]))
        prefixes = options.get("prefixes")
        plan = plan_attention(query_starts_S1, context_lens_S, shape, prefixes=prefixes, device=q_THD.device)
    if out is None:
        out = q_THD.new_empty(num_tokens, num_heads, v_cache.shape[3])
    call = AttentionCall(
        q_THD.contiguous(), k_cache, v_cache, block_tables_SB, query_starts_S1, context_lens_S, out,
        options["scale"], options.get("window"), options.get("softcap"), options.get("sinks_H"),
        options.get("k_scales"), options.get("v_scales"),
    )  # fmt: skip
    num_programs = PROGRAMS_PER_PROCESSOR * num_processors(q_THD.device)
    for launch in paged_attention_launches(call, plan, num_programs):
        launch.run()
    return out


def paged_attention(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_SB: Tensor,
    query_starts_S1: Tensor,
    context_lens_S: Tensor,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """Attend with the queries of S sequences, prompt chunks and decodes in one call -> [T, H, Dv] in q's dtype.

    q_THD: the queries of sequence s are rows query_starts_S1[s] to query_starts_S1[s + 1] (int32), the last ones of its
        context_lens_S[s] tokens (int32), whose keys and values are in the cache already.
    k_cache, v_cache: [N, K, B, D] and [N, K, B, Dv] of any float dtype, or int8 with fp32 scales [N, K, B].
    block_tables_SB: int32, the blocks of each sequence; entries past its context are not read.
    Raises ValueError where the block size does not divide SEGMENT_TOKENS.
    """
    attend = paged_attention_triton if runs_on_triton(q_THD) else paged_attention_reference
    return attend(q_THD, k_cache, v_cache, block_tables_SB, query_starts_S1, context_lens_S, **options)
