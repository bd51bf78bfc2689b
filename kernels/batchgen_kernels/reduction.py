"""Sums whose order is fixed by the number of terms alone."""

from __future__ import annotations

import torch
from torch import Tensor


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension by halving it: terms i and i + n/2 first. [..., N] -> [...].

    ATen's own sum splits long rows by the number of rows and threads; additions of whole tensors cannot.
    """
    width = 1 << max(0, x.shape[-1] - 1).bit_length()
    if x.shape[-1] != width:
        x = torch.nn.functional.pad(x, (0, width - x.shape[-1]))
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x.squeeze(-1)


def tree_sum_(x: Tensor) -> Tensor:
    """Sum as `tree_sum`, to the bit, in place of x, whose last dimension is a power of two; returns a view of x."""
    width = x.shape[-1]
    while width > 1:
        width //= 2
        x[..., :width] += x[..., width : 2 * width]
    return x[..., 0]
