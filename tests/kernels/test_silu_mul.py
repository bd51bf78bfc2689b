"""silu_mul: reference against the formula, Triton kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from batchgen_kernels.silu_mul import silu_mul_reference, silu_mul_triton

from tests.kernels.dtypes import FLOATS, assert_within_rounding

SHAPES = [(0, 8), (1, 1), (2, 1536), (3, 1025), (4, 7)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("tokens", "inner"), SHAPES)
def test_reference_is_the_formula(tokens: int, inner: int, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(tokens, 2 * inner) * 4).to(dtype)
    gate, up = gate_up.double().split(inner, dim=1)
    assert_within_rounding(silu_mul_reference(gate_up), (gate * torch.sigmoid(gate) * up).to(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("tokens", "inner"), SHAPES)
def test_triton_equals_reference(tokens: int, inner: int, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(tokens, 2 * inner) * 4).to(dtype)
    assert_within_rounding(silu_mul_triton(gate_up), silu_mul_reference(gate_up))


def test_large_gates_neither_overflow_nor_become_nan() -> None:
    gate_up = torch.tensor([[-1e4, -200.0, 200.0, 1e4, 2.0, 2.0, 2.0, 2.0]])
    expected = torch.tensor([[0.0, 0.0, 400.0, 2e4]])
    for silu_mul in (silu_mul_reference, silu_mul_triton):
        torch.testing.assert_close(silu_mul(gate_up), expected)
