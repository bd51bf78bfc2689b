"""rms_norm: root-mean-square normalisation, with the residual addition before it.

Legend: T tokens, E features.
    h = x (+ residual, rounded to x's dtype);  out = h / sqrt(mean(h^2) + eps) * weight
Computed in fp32 and rounded once. Zhang and Sennrich, https://arxiv.org/abs/1910.07467.
"""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

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


@overload
def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: None = None) -> Tensor: ...
@overload
def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: Tensor) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the normalised x, or (the normalised x + residual, x + residual); inputs are not changed."""
    return rms_norm_reference(x_TE, weight_E, eps, residual_TE)
