"""rms_norm: reference against the formula, Triton kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from batchgen_kernels.rms_norm import rms_norm_reference, rms_norm_triton

from tests.kernels.dtypes import FLOATS, assert_within_rounding

SHAPES = [(0, 16), (1, 1), (1, 576), (3, 65), (5, 1000)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("tokens", "features"), SHAPES)
def test_reference_is_the_formula(tokens: int, features: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(tokens, features).to(dtype), torch.randn(features).to(dtype)
    exact = x.double() / (x.double().square().mean(1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert_within_rounding(rms_norm_reference(x, weight, 1e-5), exact.to(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_residual_is_added_and_returned(dtype: torch.dtype) -> None:
    x, residual, weight = (torch.randn(3, 40).to(dtype) for _ in range(3))
    out, hidden = rms_norm_reference(x, weight[0], 1e-6, residual)
    assert torch.equal(hidden, x + residual)
    assert torch.equal(out, rms_norm_reference(hidden, weight[0], 1e-6))


def test_reference_of_a_row_does_not_depend_on_its_neighbours() -> None:
    x, weight = torch.randn(300, 1003), torch.randn(1003)
    whole = rms_norm_reference(x, weight, 1e-5)
    assert torch.equal(rms_norm_reference(x[7:8], weight, 1e-5), whole[7:8])


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("tokens", "features"), SHAPES)
def test_triton_equals_reference(tokens: int, features: int, dtype: torch.dtype, with_residual: bool) -> None:
    x = torch.randn(tokens, 2 * features).to(dtype)[:, :features]  # strided rows
    weight = torch.randn(features).to(dtype)
    if not with_residual:
        assert_within_rounding(rms_norm_triton(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))
        return
    residual = torch.randn(tokens, features).to(dtype)
    out, hidden = rms_norm_triton(x, weight, 1e-5, residual)
    expected_out, expected_hidden = rms_norm_reference(x, weight, 1e-5, residual)
    assert_within_rounding(hidden, expected_hidden)
    # A sum rounded the other way moves the output by as much again.
    assert_within_rounding(out, expected_out, factor=3.0)
