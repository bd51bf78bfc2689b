"""The C++ rms_norm, silu_mul and rotary equal the references, and a token's bits do not depend on its neighbours."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from batchgen_kernels import cpu
from batchgen_kernels.rms_norm import rms_norm_reference
from batchgen_kernels.rotary import rotary_reference
from batchgen_kernels.silu_mul import silu_mul_reference
from torch import Tensor

from tests.kernels.cpu_cases import needs_kernels

pytestmark = needs_kernels

DTYPES = [torch.float32, torch.bfloat16]
LEVELS = cpu.levels() if cpu.is_available() else []


@pytest.fixture(autouse=True, params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    """Each instruction-set level that this processor runs."""
    cpu.set_level(request.param)
    return str(request.param)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Normal values, thrice as wide."""
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def assert_close(ours: Tensor, reference: Tensor) -> None:
    """Equal within a rounding of the dtype (fp32: within a few, since sums differ in order)."""
    atol, rtol = (2e-6, 3e-6) if ours.dtype == torch.float32 else (1e-6, 2**-7)
    assert ours.dtype == reference.dtype
    torch.testing.assert_close(ours, reference, atol=atol, rtol=rtol)


@pytest.mark.parametrize("features", [1, 16, 100, 576])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_equals_the_reference(dtype: torch.dtype, features: int) -> None:
    x, residual = random(7, features, dtype=dtype), random(7, 2 * features, dtype=dtype, seed=1)[:, :features]
    for weight in (random(features, dtype=dtype, seed=2), random(features, dtype=torch.float32, seed=2)):
        assert_close(cpu.rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))
        (out, hidden), (expected, expected_hidden) = (
            norm(x, weight, 1e-5, residual) for norm in (cpu.rms_norm, rms_norm_reference)
        )
        assert_close(out, expected)
        assert torch.equal(hidden, expected_hidden)


@pytest.mark.parametrize("inner", [1, 17, 96])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul_equals_the_reference(dtype: torch.dtype, inner: int) -> None:
    gate_up = random(5, 2 * inner, dtype=dtype)
    gate_up[0, 0], gate_up[1, 0], gate_up[2, 0] = 200.0, -200.0, 0.0
    assert_close(cpu.silu_mul(gate_up), silu_mul_reference(gate_up))


@pytest.mark.parametrize(("head_dim", "rotated"), [(64, 64), (80, 20), (24, 24), (16, 2)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary_equals_the_reference(dtype: torch.dtype, head_dim: int, rotated: int) -> None:
    merged = random(6, 5, head_dim, dtype=dtype)
    q, k = merged[:, :3], merged[:, 3:].transpose(0, 1).contiguous().transpose(0, 1)
    for angle_dtype in (dtype, torch.float32):
        cos, sin = random(6, rotated, dtype=angle_dtype, seed=1), random(6, rotated, dtype=angle_dtype, seed=2)
        for ours, reference in zip(cpu.rotary(q, k, cos, sin), rotary_reference(q, k, cos, sin), strict=True):
            assert_close(ours, reference)


@pytest.mark.parametrize(
    "op",
    [
        lambda x: cpu.rms_norm(x, x[0].clone().fill_(0.5), 1e-6),
        lambda x: cpu.rms_norm(x, x[0].clone().fill_(0.5), 1e-6, x)[0],
        cpu.silu_mul,
        lambda x: cpu.rotary(x.view(-1, 9, 64), x.view(-1, 9, 64), x[:, :64], x[:, 64:128])[0].flatten(1),
    ],
    ids=["rms_norm", "rms_norm_residual", "silu_mul", "rotary"],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_has_the_same_bits_among_any_neighbours_and_threads(
    dtype: torch.dtype, op: Callable[[Tensor], Tensor]
) -> None:
    x = random(100, 576, dtype=dtype)
    x[0] = 1.0
    whole = op(x)
    assert torch.equal(torch.cat([op(torch.cat([x[:1], row]))[1:] for row in x.split(1)]), whole)
    torch.set_num_threads(2)
    assert torch.equal(op(x), whole)


def test_what_does_not_fit_is_refused_by_name() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(TypeError, match=r"x must be torch.float32 or torch.bfloat16, got torch.float64"):
        cpu.rms_norm(x.double(), x[0], 1e-5)
    with pytest.raises(ValueError, match=r"weight must be \[8\]"):
        cpu.rms_norm(x, x[0, :4], 1e-5)
    with pytest.raises(ValueError, match="even width, got 7"):
        cpu.silu_mul(x[:, :7])
    with pytest.raises(ValueError, match="cos has 2 tokens, q 1 and k 2"):
        cpu.rotary(x[:1, None], x[:, None], x, x)
