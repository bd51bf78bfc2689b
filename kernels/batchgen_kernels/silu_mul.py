"""silu_mul: the gate of a gated feed-forward layer.

Legend: T tokens, I inner features.
    gate, up = halves of gate_up;  out = gate / (1 + exp(-gate)) * up
Computed in fp32 and rounded once. Shazeer, https://arxiv.org/abs/2002.05202.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchgen_kernels.launch import Launch, jit, runs_on_triton, tl

BLOCK_I = 1024


def silu_mul_reference(gate_up_T2I: Tensor) -> Tensor:
    """Compute in torch; see `silu_mul`."""
    gate_TI, up_TI = gate_up_T2I.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate_TI) * up_TI).to(gate_up_T2I.dtype)


@jit
def _silu_mul_kernel(
    gate_up_ptr: tl.tensor, out_ptr: tl.tensor, stride: int, num_inner: int, BLOCK_I: tl.constexpr
) -> None:
    """Compute BLOCK_I outputs of one token."""
    token = tl.program_id(0).to(tl.int64)
    inner = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    inside = inner < num_inner
    gate = tl.load(gate_up_ptr + token * stride + inner, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * stride + num_inner + inner, mask=inside, other=0.0).to(tl.float32)
    # exp of a number that is never positive, so that it cannot overflow.
    decay = tl.exp(-tl.abs(gate))
    out = gate * (tl.where(gate >= 0, 1.0, decay) / (1.0 + decay)) * up
    tl.store(out_ptr + token * num_inner + inner, out.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul_launch(gate_up_T2I: Tensor, out_TI: Tensor) -> Launch:
    """Describe the launch: one program per token and BLOCK_I outputs."""
    num_tokens, num_inner = out_TI.shape
    return Launch(
        _silu_mul_kernel,
        (num_tokens, -(-num_inner // BLOCK_I)),
        {"gate_up_ptr": gate_up_T2I, "out_ptr": out_TI, "stride": gate_up_T2I.stride(0), "num_inner": num_inner},
        {"BLOCK_I": BLOCK_I},
    )


def silu_mul_triton(gate_up_T2I: Tensor) -> Tensor:
    """Compute by the Triton kernel; see `silu_mul`."""
    num_tokens, width = gate_up_T2I.shape
    out_TI = torch.empty(num_tokens, width // 2, dtype=gate_up_T2I.dtype, device=gate_up_T2I.device)
    silu_mul_launch(gate_up_T2I, out_TI).run()
    return out_TI


def silu_mul(gate_up_T2I: Tensor) -> Tensor:
    """Return silu(gate) * up as [T, I] in the dtype of `gate_up_T2I` [T, 2 * I], gate first."""
    return silu_mul_triton(gate_up_T2I) if runs_on_triton(gate_up_T2I) else silu_mul_reference(gate_up_T2I)
