"""store_kv: write new keys and values into the paged cache.

Legend: T tokens, H KV heads, D head size (Dv of the values), N blocks, B block size.
    slot = block * B + offset;  cache[block, h, offset] = x[t, h];  slot -1: the token is not stored.
Quantized caches (int8, fp8 e4m3) hold x / scale with one fp32 scale per token and head, max |x| / 127 or / 448.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
    store_kv_reference(k_THD, v_THD, k_cache, v_cache, slots_T, k_scales, v_scales)
