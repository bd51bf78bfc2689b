"""store_kv: write new keys and values into the paged cache.

Legend: T tokens, H KV heads, D head size (Dv of the values), N blocks, B block size.
    slot = block * B + offset;  cache[block, h, offset] = x[t, h];  slot -1: the token is not stored.
Quantized caches (int8, fp8 e4m3) hold x / scale with one fp32 scale per token and head, max |x| / 127 or / 448.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from batchgen_kernels.launch import INTERPRETED, Launch, check_fp8, jit, next_power_of_2, runs_on_triton, tl

QUANTIZED_MAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest magnitude of each quantized cache dtype; caches of other dtypes hold plain values."""


def quantize(x_THD: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x / scale rounded to `dtype` (ties to even), and the fp32 scale_TH; rows of zeros have scale 0."""
    x = x_THD.float()
    scale_TH = x.abs().amax(-1) / QUANTIZED_MAX[dtype]
    scaled = x / torch.where(scale_TH > 0, scale_TH, 1.0).unsqueeze(-1)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale_TH


def _write(x_THD: Tensor, cache_NHBD: Tensor, slots_T: Tensor, scales_NHB: Tensor | None) -> None:
    block_size = cache_NHBD.shape[2]
    stored = slots_T >= 0
    slots, x = slots_T[stored], x_THD[stored]
    blocks, offsets = slots // block_size, slots % block_size
    if cache_NHBD.dtype in QUANTIZED_MAX:
        if scales_NHB is None:
            raise ValueError(f"a {cache_NHBD.dtype} cache needs k_scales and v_scales")
        x, scale = quantize(x, cache_NHBD.dtype)
        scales_NHB[blocks, :, offsets] = scale
    cache_NHBD[blocks, :, offsets] = x.to(cache_NHBD.dtype)


def store_kv_reference(
    k_THD: Tensor,
    v_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots_T: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """Store in torch; see `store_kv`."""
    _write(k_THD, k_cache, slots_T, k_scales)
    _write(v_THD, v_cache, slots_T, v_scales)


@jit
def _round_to_e4m3(x: tl.tensor) -> tl.tensor:
    """Round fp32 to the nearest e4m3 value, ties to even; |x| <= 448."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF).to(tl.float32, bitcast=True)
    # Below 2^-6 the values are multiples of 2^-9.
    return tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, normal)


@jit
def _store_heads(
    x_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    head_stride: int,
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_INT8: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Store all heads of one token; the pointers stand at the token's first feature, at its slot and at its scale."""
    head = tl.arange(0, BLOCK_H)
    feature = tl.arange(0, BLOCK_D)[None, :]
    inside = (head[:, None] < NUM_HEADS) & (feature < HEAD_DIM)
    x = tl.load(x_ptr + head[:, None] * head_stride + feature, mask=inside, other=0.0).to(tl.float32)
    if LARGEST > 0:
        scale = tl.div_rn(tl.max(tl.abs(x), axis=1), LARGEST)
        tl.store(scales_ptr + head * BLOCK_SIZE, scale, mask=head < NUM_HEADS)
        x = tl.div_rn(x, tl.where(scale > 0, scale, 1.0)[:, None])
        if IS_INT8:
            # Adding 1.5 * 2^23 leaves no bits for the fraction: rounds to even, as torch.round does.
            x = (x + 12582912.0) - 12582912.0
        elif INTERPRETED:
            # The interpreter's own conversion to fp8 rounds up without carrying into the exponent.
            x = _round_to_e4m3(x)
    cache = cache_ptr + head[:, None] * (BLOCK_SIZE * HEAD_DIM) + feature
    tl.store(cache, x.to(cache_ptr.dtype.element_ty), mask=inside)


@jit
def _store_kv_kernel(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    k_scales_ptr: tl.tensor,
    v_scales_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    k_stride: int,
    k_head_stride: int,
    v_stride: int,
    v_head_stride: int,
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_INT8: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Store one token's keys (second grid index 0) or values (1)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    # Of a head's first slot in the block, counted in slots; every head of a block has BLOCK_SIZE of them.
    place = (slot // BLOCK_SIZE) * (NUM_HEADS * BLOCK_SIZE) + slot % BLOCK_SIZE
    if tl.program_id(1) == 0:
        k_ptr += token * k_stride
        k_cache_ptr += place * K_DIM
        k_scales_ptr += place
        _store_heads(
            k_ptr, k_cache_ptr, k_scales_ptr, k_head_stride,
            NUM_HEADS, BLOCK_SIZE, K_DIM, LARGEST, IS_INT8, INTERPRETED, BLOCK_H, BLOCK_K,
        )  # fmt: skip
    else:
        v_ptr += token * v_stride
        v_cache_ptr += place * V_DIM
        v_scales_ptr += place
        _store_heads(
            v_ptr, v_cache_ptr, v_scales_ptr, v_head_stride,
            NUM_HEADS, BLOCK_SIZE, V_DIM, LARGEST, IS_INT8, INTERPRETED, BLOCK_H, BLOCK_V,
        )  # fmt: skip


def _store_kv_constants(k_cache: Tensor, v_cache: Tensor) -> dict[str, Any]:
    return {
        "NUM_HEADS": k_cache.shape[1],
        "BLOCK_SIZE": k_cache.shape[2],
        "K_DIM": k_cache.shape[3],
        "V_DIM": v_cache.shape[3],
        "LARGEST": QUANTIZED_MAX.get(k_cache.dtype, 0.0),
        "IS_INT8": k_cache.dtype == torch.int8,
        "INTERPRETED": INTERPRETED,
        "BLOCK_H": next_power_of_2(k_cache.shape[1]),
        "BLOCK_K": next_power_of_2(k_cache.shape[3]),
        "BLOCK_V": next_power_of_2(v_cache.shape[3]),
    }


def store_kv_launch(
    k_THD: Tensor,
    v_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots_T: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Launch:
    """Describe the launch: a program for each token's keys and one for its values; only features must be dense."""
    if k_cache.dtype in QUANTIZED_MAX and (k_scales is None or v_scales is None):
        raise ValueError(f"a {k_cache.dtype} cache needs k_scales and v_scales")
    return Launch(
        _store_kv_kernel,
        (len(slots_T), 2),
        {
            "k_ptr": k_THD,
            "v_ptr": v_THD,
            "k_cache_ptr": k_cache,
            "v_cache_ptr": v_cache,
            "k_scales_ptr": slots_T if k_scales is None else k_scales,
            "v_scales_ptr": slots_T if v_scales is None else v_scales,
            "slots_ptr": slots_T,
            "k_stride": k_THD.stride(0),
            "k_head_stride": k_THD.stride(1),
            "v_stride": v_THD.stride(0),
            "v_head_stride": v_THD.stride(1),
        },
        _store_kv_constants(k_cache, v_cache),
        num_warps=min(8, max(1, next_power_of_2(k_cache.shape[1] * k_cache.shape[3]) // 256)),
    )


def store_kv_triton(
    k_THD: Tensor,
    v_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots_T: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """Store by the Triton kernel; see `store_kv`. ValueError for fp8 caches on devices before sm_89."""
    check_fp8(k_cache)
    store_kv_launch(k_THD, v_THD, k_cache, v_cache, slots_T, k_scales, v_scales).run()


def store_kv(
    k_THD: Tensor,
    v_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots_T: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """Write k and v of T tokens into the caches [N, H, B, D] at `slots_T` (int64, distinct; -1 skips the token).

    Quantized caches also take fp32 scales [N, H, B]; ValueError where they are missing.
    """
    store = store_kv_triton if runs_on_triton(k_cache) else store_kv_reference
    store(k_THD, v_THD, k_cache, v_cache, slots_T, k_scales, v_scales)
