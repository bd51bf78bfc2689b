"""The shapes that kernels are compiled for and measured at, as launches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from batchgen_kernels.attention_plan import AttentionPlan, plan_attention, tile_shape
from batchgen_kernels.copy_blocks import copy_blocks_launch
from batchgen_kernels.launch import Launch
from batchgen_kernels.paged_attention import AttentionCall, paged_attention_launches
from batchgen_kernels.rms_norm import rms_norm_launch
from batchgen_kernels.rotary import rotary_launch
from batchgen_kernels.sample import SampleBuffers, SampleParams, TokenBias, TokenCounts, sample_launches
from batchgen_kernels.segments import SharedPrefixes
from batchgen_kernels.silu_mul import silu_mul_launch
from batchgen_kernels.store_kv import QUANTIZED_MAX, store_kv_launch
from batchgen_kernels.top_kernels import log_softmax_kernel, top_kernel
from batchgen_kernels.top_tokens import TokenRanks, TopTokens, token_ranks_launches, top_tokens_launches
from torch import Tensor

TOP_KERNELS = (log_softmax_kernel, top_kernel)

BLOCK_SIZE = 16
TOKENS = 256


class ModelShape(NamedTuple):
    """The sizes of one model that its kernels depend on."""

    name: str
    features: int
    inner: int
    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    vocabulary: int
    window: int | None = None
    softcap: float | None = None


LLAMA_8B = ModelShape("Llama-3-8B", 4096, 14336, 32, 8, 128, 128, 128256)
QWEN_600M = ModelShape("Qwen3-0.6B", 1024, 3072, 16, 8, 128, 128, 151936)
SMOLLM2 = ModelShape("SmolLM2-135M", 576, 1536, 9, 3, 64, 64, 49152)
GEMMA_9B = ModelShape("Gemma-2-9B", 3584, 14336, 16, 8, 256, 256, 256000, window=4096, softcap=50.0)
WIDE_KEYS = ModelShape("keys of 192", 5120, 12288, 16, 16, 192, 128, 102400)

MODELS = (LLAMA_8B, QWEN_600M, SMOLLM2, GEMMA_9B, WIDE_KEYS)


class CompiledCase(NamedTuple):
    """One kernel as it is launched for one model."""

    shape: str
    launch: Launch


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _caches(model: ModelShape, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    k, v = (_empty(64, model.kv_heads, BLOCK_SIZE, dim, dtype=dtype) for dim in (model.k_dim, model.v_dim))
    scales = _empty(64, model.kv_heads, BLOCK_SIZE, dtype=torch.float32) if dtype in QUANTIZED_MAX else None
    return k, v, scales, scales


def _attention(model: ModelShape, cache_dtype: torch.dtype, *, deterministic: bool = False) -> list[Launch]:
    """Decodes that share a prefix beside a prompt chunk: every attention kernel once."""
    k_cache, v_cache, k_scales, v_scales = _caches(model, cache_dtype)
    shape = tile_shape(model.heads, model.kv_heads, max(model.k_dim, model.v_dim), deterministic=deterministic)
    prefixes = SharedPrefixes(torch.tensor([0, 2]), torch.tensor([0, 1]), torch.tensor([512]))
    plan = plan_attention([0, 1, 2, TOKENS], [600, 700, 800], shape, prefixes=prefixes)
    dtype = torch.bfloat16 if cache_dtype in QUANTIZED_MAX else cache_dtype
    call = AttentionCall(
        _empty(TOKENS, model.heads, model.k_dim, dtype=dtype), k_cache, v_cache, _empty(3, 64, dtype=torch.int32),
        _empty(4, dtype=torch.int32), _empty(3, dtype=torch.int32),
        _empty(TOKENS, model.heads, model.v_dim, dtype=dtype),
        model.k_dim**-0.5, model.window, model.softcap, None, k_scales, v_scales,
    )  # fmt: skip
    on_meta = [part.to("meta") if isinstance(part, Tensor) else part for part in plan]
    return paged_attention_launches(call, AttentionPlan(*on_meta), 1)  # type: ignore[arg-type]


def _sampling(model: ModelShape, *, controls: bool) -> list[Launch]:
    logits, keys = _empty(TOKENS, model.vocabulary), _empty(TOKENS, 5, dtype=torch.int64)
    row = _empty(TOKENS, dtype=torch.float32)
    index, counts = _empty(4096, dtype=torch.int64), _empty(4096, dtype=torch.int32)
    every = SampleParams(
        row, index[:TOKENS], row, row, row, row, row,
        TokenBias(index, index, _empty(4096, dtype=torch.float32)), TokenCounts(index, index, counts),
    )  # fmt: skip
    params = every if controls else SampleParams()
    found = _top(8)
    ranks = TokenRanks(found.logprobs_RK, found.token_ids_RK, found.token_ids_RK, found.logprobs_RK)
    # Of both, the kernels that `sample` has not.
    ranking = token_ranks_launches(logits, found.token_ids_RK, ranks)[1:2] if controls else []
    best = [launch for launch in top_tokens_launches(logits, params, found) if launch.kernel in TOP_KERNELS]
    return [*sample_launches(logits, params, keys, SampleBuffers.allocate(logits, params)), *best, *ranking]


def _top(count: int) -> TopTokens:
    scores = _empty(TOKENS, count, dtype=torch.float32)
    return TopTokens(_empty(TOKENS, count, dtype=torch.int64), scores, scores)


def _elementwise(model: ModelShape) -> list[Launch]:
    x, weight = _empty(TOKENS, model.features), _empty(model.features)
    q, k = _empty(TOKENS, model.heads, model.k_dim), _empty(TOKENS, model.kv_heads, model.k_dim)
    angles = _empty(TOKENS, model.k_dim)
    table = _empty(2, 2, dtype=torch.int64)
    return [
        rms_norm_launch(x, weight, 1e-5, None, x, x),
        rms_norm_launch(x, weight, 1e-5, x, x, x),
        rotary_launch(q, k, angles, angles, q, k),
        silu_mul_launch(_empty(TOKENS, 2 * model.inner), _empty(TOKENS, model.inner)),
        copy_blocks_launch(_caches(model, torch.bfloat16)[:2], table, table),
    ]


def _stores(model: ModelShape, dtype: torch.dtype) -> list[Launch]:
    k_cache, v_cache, k_scales, v_scales = _caches(model, dtype)
    k, v = (_empty(TOKENS, model.kv_heads, dim) for dim in (model.k_dim, model.v_dim))
    return [store_kv_launch(k, v, k_cache, v_cache, _empty(TOKENS, dtype=torch.int64), k_scales, v_scales)]


def compiled_cases() -> Iterator[CompiledCase]:
    """Every kernel at the shapes of every model; narrow caches and deterministic tiles at those of the first."""
    for model in MODELS:
        launches = _elementwise(model) + _stores(model, torch.bfloat16) + _attention(model, torch.bfloat16)
        for launch in launches + _sampling(model, controls=False):
            yield CompiledCase(model.name, launch)
    for dtype in (torch.float16, torch.int8, torch.float8_e4m3fn):
        name = str(dtype).removeprefix("torch.")
        for launch in _stores(LLAMA_8B, dtype) + _attention(LLAMA_8B, dtype):
            yield CompiledCase(f"{LLAMA_8B.name}, {name} cache", launch)
    for launch in _attention(LLAMA_8B, torch.bfloat16, deterministic=True):
        yield CompiledCase(f"{LLAMA_8B.name}, deterministic", launch)
    for launch in _sampling(LLAMA_8B, controls=True):
        yield CompiledCase(f"{LLAMA_8B.name}, all controls", launch)
