"""Matrix products whose rows do not know their neighbours.

torch's own products choose another kernel, and so another order of summation, for other numbers of rows and threads.
These keep one order, so that a token's hidden state is the same bits in every batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from batchgen_kernels import cpu
from torch import nn

from batchgen.errors import ModelError

MIN_ROWS = 8
"""oneDNN's packed fp32 product is the same for every number of rows from 2 up; short inputs are padded to this many."""

ROUNDING_STEPS = 8
"""A packed product may differ from torch's by this many roundings of the sum of its terms' magnitudes."""


class PackedLinear(nn.Module):
    """x [..., K] -> x W^T + b [..., N] over a weight [N, K] that is packed once; each row depends on that row alone.

    bf16 goes through the C++ kernel where it is built: on processors with AMX, oneDNN's bf16 product does depend on
    the number of rows. fp32 goes through oneDNN.
    """

    def __init__(self, linear: nn.Linear, out_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        weight = linear.weight.detach()
        bias = None if linear.bias is None else linear.bias.detach()
        self._out_dtype = out_dtype or weight.dtype
        if weight.dtype == torch.bfloat16 and cpu.is_available():
            self._product = _kernel_product(weight, bias, self._out_dtype)
        else:
            self._product = _onednn_product(weight, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product in `out_dtype`."""
        rows_TK = x.reshape(-1, self.in_features)
        return self._product(rows_TK).view(*x.shape[:-1], self.out_features).to(self._out_dtype)


def _kernel_product(
    weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> Callable[[torch.Tensor], torch.Tensor]:
    packed = cpu.PackedLinear(weight, bias)
    return lambda rows_TK: packed(rows_TK, out_dtype=out_dtype)


def _onednn_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)

    def product(rows_TK: torch.Tensor) -> torch.Tensor:
        num_rows = len(rows_TK)
        if num_rows < MIN_ROWS:
            rows_TK = nn.functional.pad(rows_TK, (0, 0, 0, MIN_ROWS - num_rows))
        out_TN: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows_TK.contiguous(), packed, bias, "none", [], "")
        return out_TN[:num_rows]

    return product


def pack_linears(model: nn.Module, head: nn.Module | None = None) -> int:
    """Replace every nn.Linear of the model by its packed twin, checked against it; returns how many.

    `head` is the layer that makes logits: its result stays fp32, so that near-ties are not rounded into ties. Raises
    ModelError where a twin computes something else.
    """
    found = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    linears = [(parent, name, child) for parent, name, child in found if type(child) is nn.Linear]
    for parent, name, linear in linears:
        packed = PackedLinear(linear, torch.float32 if linear is head else None)
        _check_twin(f"{type(parent).__name__}.{name}", linear, packed)
        setattr(parent, name, packed)
    return len(linears)


@torch.inference_mode()
def _check_twin(name: str, linear: nn.Linear, packed: PackedLinear) -> None:
    x = torch.linspace(-1.0, 1.0, 3 * linear.in_features).sin().view(3, -1).to(linear.weight.dtype)
    difference = (packed(x).float() - linear(x).float()).abs()
    magnitude = nn.functional.linear(x.float().abs(), linear.weight.float().abs())
    if not bool((difference <= ROUNDING_STEPS * torch.finfo(linear.weight.dtype).eps * (magnitude + 1.0)).all()):
        raise ModelError(
            f"{name}: the packed product differs from torch's by {difference.max().item():.3g}; this is a bug of "
            "batchgen or of the processor's kernels, please report it"
        )
