"""How close a kernel must come to its reference, by dtype."""

from __future__ import annotations

import torch

FLOATS = [torch.float32, torch.bfloat16, torch.float16]

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""One unit in the last place, and for fp32 what another order of sums may change; Triton's interpreter cuts bf16."""


def assert_within_rounding(actual: torch.Tensor, expected: torch.Tensor, factor: float = 1.0) -> None:
    """Fail unless both have one dtype and differ by at most one last place (times `factor`)."""
    assert actual.dtype == expected.dtype
    tolerance = ROUNDING[expected.dtype] * factor
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance * 0.5)
