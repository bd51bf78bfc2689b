"""silu_mul: the gate of a gated feed-forward layer.

Legend: T tokens, I inner features.
    gate, up = halves of gate_up;  out = gate / (1 + exp(-gate)) * up
Computed in fp32 and rounded once. Shazeer, https://arxiv.org/abs/2002.05202.
"""

from __future__ import annotations

import torch
from torch import Tensor


def silu_mul_reference(gate_up_T2I: Tensor) -> Tensor:
    """Compute in torch; see `silu_mul`."""
    gate_TI, up_TI = gate_up_T2I.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate_TI) * up_TI).to(gate_up_T2I.dtype)


def silu_mul(gate_up_T2I: Tensor) -> Tensor:
    """Return silu(gate) * up as [T, I] in the dtype of `gate_up_T2I` [T, 2 * I], gate first."""
    return silu_mul_reference(gate_up_T2I)
