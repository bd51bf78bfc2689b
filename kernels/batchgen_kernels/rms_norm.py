"""rms_norm: root-mean-square normalisation, with the residual addition before it.

Legend: T tokens, E features.
    h = x (+ residual, rounded to x's dtype);  out = h / sqrt(mean(h^2) + eps) * weight
Computed in fp32 and rounded once. Zhang and Sennrich, https://arxiv.org/abs/1910.07467.
"""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from batchgen_kernels.launch import Launch, jit, next_power_of_2, runs_on_triton, tl
from batchgen_kernels.reduction import tree_sum


@overload
def rms_norm_reference(x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: None = None) -> Tensor: ...
@overload
def rms_norm_reference(x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: Tensor) -> tuple[Tensor, Tensor]: ...
def rms_norm_reference(
    x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise in torch; see `rms_norm`."""
    hidden_TE = x_TE if residual_TE is None else x_TE + residual_TE
    h = hidden_TE.float()
    mean = tree_sum(h * h).unsqueeze(-1) / h.shape[-1]
    out_TE = (h * torch.rsqrt(mean + eps) * weight_E.float()).to(x_TE.dtype)
    return out_TE if residual_TE is None else (out_TE, hidden_TE)


@jit
def _rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    hidden_ptr: tl.tensor,
    x_stride: int,
    residual_stride: int,
    num_features: int,
    eps: float,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> None:
    """Normalise one token; its features stay in registers."""
    token = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, BLOCK_E)
    inside = feature < num_features
    h = tl.load(x_ptr + token * x_stride + feature, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + token * residual_stride + feature, mask=inside, other=0.0)
        hidden = (h + residual.to(tl.float32)).to(hidden_ptr.dtype.element_ty)
        tl.store(hidden_ptr + token * num_features + feature, hidden, mask=inside)
        h = hidden.to(tl.float32)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(h * h, axis=0) / num_features + eps)
    weight = tl.load(weight_ptr + feature, mask=inside, other=0.0).to(tl.float32)
    out = (h * inverse * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * num_features + feature, out, mask=inside)


def rms_norm_launch(
    x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: Tensor | None, out_TE: Tensor, hidden_TE: Tensor
) -> Launch:
    """Describe the launch: one program per token; rows of x and residual may be strided, their features not."""
    num_tokens, num_features = x_TE.shape
    block = next_power_of_2(num_features)
    residual = x_TE if residual_TE is None else residual_TE
    return Launch(
        _rms_norm_kernel,
        (num_tokens,),
        {
            "x_ptr": x_TE,
            "residual_ptr": residual,
            "weight_ptr": weight_E,
            "out_ptr": out_TE,
            "hidden_ptr": hidden_TE,
            "x_stride": x_TE.stride(0),
            "residual_stride": residual.stride(0),
            "num_features": num_features,
            "eps": eps,
        },
        {"HAS_RESIDUAL": residual_TE is not None, "BLOCK_E": block},
        num_warps=min(16, max(1, block // 512)),
    )


@overload
def rms_norm_triton(x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: None = None) -> Tensor: ...
@overload
def rms_norm_triton(x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: Tensor) -> tuple[Tensor, Tensor]: ...
def rms_norm_triton(
    x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise by the Triton kernel; see `rms_norm`."""
    out_TE = torch.empty(x_TE.shape, dtype=x_TE.dtype, device=x_TE.device)
    hidden_TE = out_TE if residual_TE is None else torch.empty_like(out_TE)
    rms_norm_launch(x_TE, weight_E, eps, residual_TE, out_TE, hidden_TE).run()
    return out_TE if residual_TE is None else (out_TE, hidden_TE)


@overload
def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: None = None) -> Tensor: ...
@overload
def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: Tensor) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the normalised x, or (the normalised x + residual, x + residual); inputs are not changed."""
    if runs_on_triton(x_TE):
        return rms_norm_triton(x_TE, weight_E, eps, residual_TE)
    return rms_norm_reference(x_TE, weight_E, eps, residual_TE)
