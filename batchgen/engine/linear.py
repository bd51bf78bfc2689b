"""Matrix products whose rows do not know their neighbours.

torch's own products choose another kernel, and so another order of summation, for other numbers of rows and threads.
These keep one order, so that a token's hidden state is the same bits in every batch.
"""

from __future__ import annotations

import torch
from torch import nn

MIN_ROWS = 8
"""oneDNN's packed fp32 product is the same for every number of rows from 2 up; short inputs are padded to this many."""


class PackedLinear(nn.Module):
    """x [..., K] -> x W^T + b [..., N] over a weight [N, K] that is packed once for oneDNN."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Each row's result depends on that row alone."""
        rows_TK = x.reshape(-1, self.in_features)
        num_rows = len(rows_TK)
        if num_rows < MIN_ROWS:
            rows_TK = nn.functional.pad(rows_TK, (0, 0, 0, MIN_ROWS - num_rows))
        out_TN: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows_TK.contiguous(), self._packed, self._bias, "none", [], ""
        )
        return out_TN[:num_rows].view(*x.shape[:-1], self.out_features)


def pack_linears(model: nn.Module) -> int:
    """Replace every nn.Linear of the model by its packed twin; returns how many."""
    found = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    linears = [(parent, name, child) for parent, name, child in found if type(child) is nn.Linear]
    for parent, name, linear in linears:
        setattr(parent, name, PackedLinear(linear))
    return len(linears)
