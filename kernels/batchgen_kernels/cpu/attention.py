"""store_kv, copy_blocks and paged_attention on the CPU; formulas stand in the modules of those names one level up.

Legend: T tokens, S sequences, H query heads, K KV heads, D head size (Dv of the values), N blocks, B block size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from batchgen_kernels.cpu.library import dtype_code, library, pointer
from batchgen_kernels.segments import SharedPrefixes, check_block_size

_FLOATS = (torch.float32, torch.bfloat16)
_P, _I64, _I32, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class _AttentionArgs(ctypes.Structure):
    """AttentionArgs of api.h."""

    _fields_ = [
        *((name, _P) for name in ("q", "k_cache", "v_cache", "k_scales", "v_scales")),
        *((name, _P) for name in ("block_tables", "query_starts", "context_lens", "sinks", "out")),
        *((name, _I64) for name in ("q_stride_t", "q_stride_h", "table_stride")),
        *((name, _I32) for name in ("num_sequences", "num_heads", "num_kv_heads")),
        *((name, _I32) for name in ("head_dim_k", "head_dim_v", "block_size", "dtype", "kv_dtype", "window", "share")),
        ("scale", _F),
        ("softcap", _F),
        ("num_threads", _I32),
    ]


class _StoreArgs(ctypes.Structure):
    """StoreArgs of api.h."""

    _fields_ = [
        *((name, _P) for name in ("k", "v", "k_cache", "v_cache", "k_scales", "v_scales", "slots")),
        *((name, _I64) for name in ("k_stride_t", "k_stride_h", "v_stride_t", "v_stride_h")),
        *((name, _I32) for name in ("num_tokens", "num_kv_heads", "head_dim_k", "head_dim_v", "block_size")),
        *((name, _I32) for name in ("dtype", "kv_dtype", "num_threads")),
    ]


def _check_caches(k_cache: Tensor, v_cache: Tensor, k_scales: Tensor | None, v_scales: Tensor | None) -> None:
    if k_cache.shape[:3] != v_cache.shape[:3] or k_cache.dtype != v_cache.dtype:
        raise ValueError(f"k_cache {list(k_cache.shape)} and v_cache {list(v_cache.shape)} differ in blocks or dtype")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("k_cache and v_cache must be contiguous")
    if k_cache.dtype == torch.int8:
        for scales in (k_scales, v_scales):
            if scales is None or scales.dtype != torch.float32 or scales.shape != k_cache.shape[:3]:
                raise ValueError("int8 caches need fp32 k_scales and v_scales [N, K, B]")
            if not scales.is_contiguous():
                raise ValueError("k_scales and v_scales must be contiguous")


def _index(x: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """Return x contiguous; TypeError unless it holds `dtype`."""
    if x.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {x.dtype}")
    return x.contiguous()


def _rows(x_THD: Tensor) -> Tensor:
    """Return x with its last dimension contiguous; other strides are free."""
    return x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous()


def store_kv(
    k_THD: Tensor,
    v_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots_T: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """Write k and v of T tokens into the caches [N, K, B, D] at `slots_T` (int64; -1 skips the token).

    The caches hold k's dtype (fp32 or bf16), or int8 with fp32 scales [N, K, B]. TypeError and ValueError name what
    does not fit; slots are not checked against N.
    """
    _check_caches(k_cache, v_cache, k_scales, v_scales)
    kv_dtype = dtype_code(k_cache, "k_cache", (k_THD.dtype, torch.int8))
    tokens, heads, dim_k = k_THD.shape
    if v_THD.dtype != k_THD.dtype or v_THD.shape[:2] != k_THD.shape[:2] or slots_T.shape != (tokens,):
        raise ValueError("k, v and slots_T must agree in tokens, heads and dtype")
    if (heads, dim_k, v_THD.shape[2]) != (k_cache.shape[1], k_cache.shape[3], v_cache.shape[3]):
        raise ValueError("k and v must have the heads and head sizes of the caches")
    k, v, slots = _rows(k_THD), _rows(v_THD), _index(slots_T, "slots_T", torch.int64)
    args = _StoreArgs(
        k.data_ptr(), v.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), pointer(k_scales), pointer(v_scales),
        slots.data_ptr(), k.stride(0), k.stride(1), v.stride(0), v.stride(1), tokens, heads, dim_k, v.shape[2],
        k_cache.shape[2], dtype_code(k, "k", _FLOATS), kv_dtype, torch.get_num_threads(),
    )  # fmt: skip
    library().bg_store_kv(ctypes.byref(args))


def copy_blocks(caches: Sequence[Tensor], pairs_P2: Tensor) -> None:
    """Copy block src to block dst for each row (src, dst) of `pairs_P2` (int64) in each of `caches` [N, ...]."""
    pairs = _index(pairs_P2, "pairs_P2", torch.int64)
    if not len(pairs):
        return
    if any(not cache.is_contiguous() for cache in caches):
        raise ValueError("caches must be contiguous")
    pointers = (_P * len(caches))(*(cache.data_ptr() for cache in caches))
    sizes = (_I64 * len(caches))(*(cache.stride(0) * cache.element_size() for cache in caches))
    library().bg_copy_blocks(pointers, sizes, len(caches), _P(pairs.data_ptr()), len(pairs), torch.get_num_threads())


def paged_attention(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_SB: Tensor,
    query_starts_S1: Tensor,
    context_lens_S: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    prefixes: SharedPrefixes | None = None,
    out: Tensor | None = None,
    share: bool = True,
) -> Tensor:
    """Attend with the queries of S sequences -> [T, H, Dv] in q's dtype (fp32 or bf16).

    As `batchgen_kernels.paged_attention.paged_attention`. Shared prefixes are found in the block tables, so `prefixes`
    is not needed; `share=False` reads them once per sequence, with the same bits. TypeError and ValueError name what
    does not fit; block tables are not checked against N.
    """
    _check_caches(k_cache, v_cache, k_scales, v_scales)
    check_block_size(k_cache.shape[2])
    (tokens, heads, dim_k), kv_heads = q_THD.shape, k_cache.shape[1]
    if dim_k != k_cache.shape[3] or heads % kv_heads:
        raise ValueError(f"q {list(q_THD.shape)} does not fit k_cache {list(k_cache.shape)}")
    dtype, kv_dtype = dtype_code(q_THD, "q", _FLOATS), dtype_code(k_cache, "k_cache", (q_THD.dtype, torch.int8))
    shape = (tokens, heads, v_cache.shape[3])
    out = q_THD.new_empty(shape) if out is None else out
    if out.shape != shape or out.dtype != q_THD.dtype or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {list(shape)} in q's dtype")
    tables = _index(block_tables_SB, "block_tables_SB", torch.int32)
    starts, lens = _index(query_starts_S1, "query_starts_S1", torch.int32), _index(context_lens_S, "lens", torch.int32)
    if len(starts) != len(lens) + 1 or len(tables) != len(lens):
        raise ValueError("block_tables, query_starts and context_lens must agree in the number of sequences")
    q, sinks = _rows(q_THD), None if sinks_H is None else sinks_H.float().contiguous()
    args = _AttentionArgs(
        q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), pointer(k_scales), pointer(v_scales), tables.data_ptr(),
        starts.data_ptr(), lens.data_ptr(), pointer(sinks), out.data_ptr(), q.stride(0), q.stride(1), tables.stride(0),
        len(lens), heads, kv_heads, dim_k, v_cache.shape[3], k_cache.shape[2], dtype, kv_dtype, window or 0, share,
        scale, softcap or 0.0, torch.get_num_threads(),
    )  # fmt: skip
    library().bg_paged_attention(ctypes.byref(args))
    return out
