"""rotary: rotary position embedding of queries and keys, half-split form.

Legend: T tokens, H query heads, K key heads, D head size, R rotated features (R <= D, the rest pass through).
    x1, x2 = halves of x[:R];  out = (x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2)
Computed in fp32 and rounded once. Su et al., https://arxiv.org/abs/2104.09864.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _rotate(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    rotated = cos_TR.shape[-1]
    x1, x2 = x_THD[..., :rotated].float().chunk(2, dim=-1)
    cos1, cos2 = cos_TR.float().unsqueeze(1).chunk(2, dim=-1)
    sin1, sin2 = sin_TR.float().unsqueeze(1).chunk(2, dim=-1)
    turned = torch.cat((x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2), dim=-1).to(x_THD.dtype)
    return turned if rotated == x_THD.shape[-1] else torch.cat((turned, x_THD[..., rotated:]), dim=-1)


def rotary_reference(q_THD: Tensor, k_TKD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate in torch; see `rotary`."""
    return _rotate(q_THD, cos_TR, sin_TR), _rotate(k_TKD, cos_TR, sin_TR)


def rotary(q_THD: Tensor, k_TKD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> tuple[Tensor, Tensor]:
    """Return rotated copies of q and k; `cos_TR` and `sin_TR` hold the angles of each token for all R features."""
    return rotary_reference(q_THD, k_TKD, cos_TR, sin_TR)
