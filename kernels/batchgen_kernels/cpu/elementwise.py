"""rms_norm, silu_mul and rotary on the CPU; formulas stand in the modules of those names one level up.

Legend: T tokens, E features, I inner features, H query heads, K key heads, D head size, R rotated features.
"""

from __future__ import annotations

import ctypes
from typing import overload

import torch
from torch import Tensor

from batchgen_kernels.cpu.library import dtype_code, library, pointer

_FLOATS = (torch.float32, torch.bfloat16)
_P, _I64, _I32, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class _RmsNormArgs(ctypes.Structure):
    """RmsNormArgs of elementwise_args.h."""

    _fields_ = [
        *((name, _P) for name in ("x", "residual", "weight", "out", "hidden")),
        *((name, _I64) for name in ("x_stride", "residual_stride")),
        *((name, _I32) for name in ("num_tokens", "num_features", "dtype", "weight_dtype")),
        ("eps", _F),
        ("num_threads", _I32),
    ]


class _SiluMulArgs(ctypes.Structure):
    """SiluMulArgs of elementwise_args.h."""

    _fields_ = [
        *((name, _P) for name in ("gate_up", "out")),
        ("stride", _I64),
        *((name, _I32) for name in ("num_tokens", "num_inner", "dtype", "num_threads")),
    ]


class _RotaryArgs(ctypes.Structure):
    """RotaryArgs of elementwise_args.h."""

    _fields_ = [
        *((name, _P) for name in ("x", "cos", "sin", "positions", "out")),
        *((name, _I64) for name in ("x_stride_t", "x_stride_h", "out_stride_t", "out_stride_h")),
        *((name, _I64) for name in ("cos_stride", "sin_stride")),
        *((name, _I32) for name in ("num_tokens", "num_heads", "head_dim", "rotated", "dtype", "angle_dtype")),
        ("num_threads", _I32),
    ]


def _dense(x: Tensor) -> Tensor:
    """Return x with its last dimension contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


@overload
def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: None = None) -> Tensor: ...
@overload
def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: Tensor) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the normalised x, or (the normalised x + residual, x + residual); fp32 or bf16, inputs are not changed.

    The weight is fp32 or bf16. Raises TypeError and ValueError for what does not fit.
    """
    dtype, weight_dtype = dtype_code(x_TE, "x", _FLOATS), dtype_code(weight_E, "weight", _FLOATS)
    tokens, features = x_TE.shape
    if weight_E.shape != (features,):
        raise ValueError(f"weight must be [{features}], got {list(weight_E.shape)}")
    if residual_TE is not None and (residual_TE.shape != x_TE.shape or residual_TE.dtype != x_TE.dtype):
        raise ValueError("residual must have the shape and dtype of x")
    x, weight = _dense(x_TE), weight_E.contiguous()
    residual = None if residual_TE is None else _dense(residual_TE)
    out = x.new_empty(x.shape)
    hidden = None if residual is None else torch.empty_like(out)
    args = _RmsNormArgs(
        x.data_ptr(), pointer(residual), weight.data_ptr(), out.data_ptr(), pointer(hidden), x.stride(0),
        0 if residual is None else residual.stride(0), tokens, features, dtype, weight_dtype, eps,
        torch.get_num_threads(),
    )  # fmt: skip
    library().bg_rms_norm(ctypes.byref(args))
    return out if hidden is None else (out, hidden)


def silu_mul(gate_up_T2I: Tensor) -> Tensor:
    """Return silu(gate) * up as [T, I] in the dtype of `gate_up_T2I` [T, 2 * I] (fp32 or bf16), gate first."""
    dtype = dtype_code(gate_up_T2I, "gate_up", _FLOATS)
    tokens, width = gate_up_T2I.shape
    if width % 2:
        raise ValueError(f"gate_up must have an even width, got {width}")
    gate_up = _dense(gate_up_T2I)
    out = gate_up.new_empty(tokens, width // 2)
    args = _SiluMulArgs(
        gate_up.data_ptr(), out.data_ptr(), gate_up.stride(0), tokens, width // 2, dtype, torch.get_num_threads()
    )
    library().bg_silu_mul(ctypes.byref(args))
    return out


def _rotate(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    dtype, angle_dtype = dtype_code(x_THD, "q and k", _FLOATS), dtype_code(cos, "cos and sin", _FLOATS)
    x = _dense(x_THD)
    out = x.new_empty(x.shape)
    args = _RotaryArgs(
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), None, out.data_ptr(), x.stride(0), x.stride(1), out.stride(0),
        out.stride(1), cos.stride(0), sin.stride(0), *x.shape, cos.shape[1], dtype, angle_dtype,
        torch.get_num_threads(),
    )  # fmt: skip
    library().bg_rotary(ctypes.byref(args))
    return out


def rotary(q_THD: Tensor, k_TKD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> tuple[Tensor, Tensor]:
    """Return rotated copies of q and k (fp32 or bf16); `cos_TR` and `sin_TR` hold the angles for all R features."""
    tokens, rotated = cos_TR.shape
    if sin_TR.shape != cos_TR.shape or sin_TR.dtype != cos_TR.dtype:
        raise ValueError("cos and sin must agree in shape and dtype")
    if rotated % 2 or rotated > min(q_THD.shape[2], k_TKD.shape[2]):
        raise ValueError(f"cos must have an even number of features, no more than a head, got {rotated}")
    if q_THD.shape[0] != tokens or k_TKD.shape[0] != tokens:
        raise ValueError(f"cos has {tokens} tokens, q {q_THD.shape[0]} and k {k_TKD.shape[0]}")
    cos, sin = _dense(cos_TR), _dense(sin_TR)
    return _rotate(q_THD, cos, sin), _rotate(k_TKD, cos, sin)
