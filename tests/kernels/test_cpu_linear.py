"""The packed products equal fp32 products, and a row's bits do not depend on the rows beside it or on the threads."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from batchgen_kernels import cpu
from batchgen_kernels.cpu import linear
from batchgen_kernels.cpu.linear import quantize_weight
from torch import Tensor

from tests.kernels.cpu_cases import needs_kernels

pytestmark = needs_kernels

LEVELS = cpu.levels() if cpu.is_available() else []
SHAPES = [(960, 576), (576, 576), (576, 1536), (70, 100), (33, 31), (1, 1), (32, 32)]
ROWS = [*range(1, 66), 127, 128, 129, 300, 512]


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    """Each instruction-set level that this processor runs."""
    cpu.set_level(request.param)
    return str(request.param)


def random_bf16(*shape: int, seed: int = 0) -> Tensor:
    """Normal values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("level")
def test_packed_product_equals_the_fp32_product(shape: tuple[int, int]) -> None:
    weight, bias, x = random_bf16(*shape), random_bf16(shape[0], seed=1), random_bf16(40, shape[1], seed=2)
    exact = x.double() @ weight.double().T
    for packed, expected in (
        (cpu.PackedLinear(weight), exact),
        (cpu.PackedLinear(weight, bias), exact + bias.double()),
    ):
        unrounded = packed(x, out_dtype=torch.float32)
        torch.testing.assert_close(unrounded, expected.float(), atol=1e-5 * shape[1] ** 0.5, rtol=1e-5)
        assert torch.equal(packed(x), unrounded.bfloat16())


def test_packed_matrices_begin_at_cache_lines_and_lie_apart() -> None:
    room = linear._Room()
    sizes = [1, 64, 100, 3 << 20, linear._CHUNK_BYTES - (1 << 20), linear._CHUNK_BYTES + 1, 65]
    taken = [room.take(size) for size in sizes]
    assert [len(each) for each in taken] == sizes
    places = sorted((each.data_ptr(), each.data_ptr() + len(each)) for each in taken)
    assert all(start % 64 == 0 for start, _ in places)
    assert all(end <= start for (_, end), (start, _) in pairwise(places))


@pytest.mark.parametrize("shape", [(960, 576), (70, 100), (64, 1536)], ids=str)
@pytest.mark.usefixtures("level")
def test_a_row_has_the_same_bits_among_any_rows_and_threads(shape: tuple[int, int]) -> None:
    packed, x = cpu.PackedLinear(random_bf16(*shape)), random_bf16(512, shape[1], seed=1)
    whole = packed(x)
    assert torch.equal(torch.cat([packed(row) for row in x[:40].split(1)]), whole[:40])
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for rows in ROWS if threads == 1 else (1, 31, 33, 129, 512):
            assert torch.equal(packed(x[-rows:]), whole[-rows:])


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_every_shape_of_the_quickstart_model_is_invariant(shape: tuple[int, int], threads: int) -> None:
    torch.set_num_threads(threads)
    packed, x = cpu.PackedLinear(random_bf16(*shape)), random_bf16(512, shape[1], seed=1)
    whole = packed(x)
    for rows in ROWS:
        assert torch.equal(packed(x[:rows]), whole[:rows])


@pytest.mark.usefixtures("level")
def test_merged_weights_give_the_bits_of_separate_ones() -> None:
    first, second, x = random_bf16(40, 64), random_bf16(56, 64, seed=1), random_bf16(5, 64, seed=2)
    merged = cpu.PackedLinear(torch.cat([first, second]))(x)
    assert torch.equal(merged, torch.cat([cpu.PackedLinear(first)(x), cpu.PackedLinear(second)(x)], dim=-1))


@pytest.mark.usefixtures("level")
def test_inputs_may_have_any_leading_shape_and_row_stride() -> None:
    packed, x = cpu.PackedLinear(random_bf16(48, 64)), random_bf16(6, 128, seed=1)
    expected = packed(x[:, :64].contiguous())
    assert torch.equal(packed(x[:, :64]), expected)
    assert torch.equal(packed(x[:, :64].reshape(2, 3, 64)), expected.view(2, 3, 48))
    assert packed(x[:0, :64]).shape == (0, 48)
    out = torch.empty(6, 48)
    assert packed(x[:, :64], out=out) is out
    assert torch.equal(out.bfloat16(), expected)


@pytest.mark.usefixtures("level")
def test_a_row_of_nan_does_not_reach_its_neighbours() -> None:
    packed, x = cpu.PackedLinear(random_bf16(40, 64)), random_bf16(20, 64, seed=1)
    before = packed(x)
    x[7] = float("nan")
    after = packed(x)
    assert after[7].isnan().all()
    assert torch.equal(after[torch.arange(20) != 7], before[torch.arange(20) != 7])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("level")
def test_int8_product_is_exact_on_the_quantized_operands(shape: tuple[int, int]) -> None:
    weight, bias, x = random_bf16(*shape), random_bf16(shape[0], seed=1), random_bf16(40, shape[1], seed=2)
    x[3], x[7] = 0, x[7] * 1e-35  # as good as zero: 127 over such numbers may be infinite
    steps_NK, scale_N = quantize_weight(weight)
    top_M1 = x.float().abs().amax(1, keepdim=True)
    # Divided in full: torch makes 127.0 / x of a reciprocal and a product.
    inverse_M1 = torch.where(top_M1 > 1e-30, torch.full_like(top_M1, 127.0) / top_M1, 0.0)
    scale_M1 = torch.where(top_M1 > 1e-30, top_M1 / 127.0, 0.0)
    sums = (x.float() * inverse_M1).round().double() @ steps_NK.double().T
    expected = sums.float() * scale_M1 * scale_N + bias.float()
    packed = cpu.PackedLinear(weight, bias, int8=True)
    assert torch.equal(packed(x, out_dtype=torch.float32), expected)
    assert torch.equal(packed(x), expected.bfloat16())


def test_int8_product_is_near_the_bf16_one() -> None:
    weight, x = random_bf16(576, 1536), random_bf16(64, 1536, seed=1)
    exact = x.float() @ weight.float().T
    difference = cpu.PackedLinear(weight, int8=True)(x, out_dtype=torch.float32) - exact
    assert difference.norm() / exact.norm() < 0.02


@pytest.mark.usefixtures("level")
def test_an_int8_row_has_the_same_bits_among_any_rows_and_threads() -> None:
    packed, x = cpu.PackedLinear(random_bf16(960, 576), int8=True), random_bf16(300, 576, seed=1)
    whole = packed(x)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for rows in (1, 2, 15, 16, 17, 33, 64, 129, 300):
            assert torch.equal(packed(x[-rows:]), whole[-rows:])


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("inner", [1, 16, 40, 96])
@pytest.mark.usefixtures("level")
def test_the_gated_product_has_the_bits_of_its_parts(inner: int, int8: bool) -> None:
    gate, up, x = random_bf16(inner, 100), random_bf16(inner, 100, seed=1), random_bf16(37, 100, seed=2)
    parts = torch.cat([cpu.PackedLinear(half, int8=int8)(x) for half in (gate, up)], dim=-1)
    gated = cpu.PackedGatedLinear(gate, up, int8=int8)
    assert torch.equal(gated(x), cpu.silu_mul(parts))
    assert torch.equal(gated(x[-1:]), gated(x)[-1:])


def test_what_does_not_fit_is_refused_by_name() -> None:
    packed = cpu.PackedLinear(random_bf16(8, 16))
    with pytest.raises(ValueError, match="must agree in shape and dtype"):
        cpu.PackedGatedLinear(random_bf16(8, 16), random_bf16(9, 16))
    with pytest.raises(ValueError, match="at most 65536 inputs"):
        cpu.PackedLinear(random_bf16(1, 65537), int8=True)
    with pytest.raises(TypeError, match=r"out must be torch.bfloat16, got torch.float32"):
        cpu.PackedGatedLinear(random_bf16(8, 16), random_bf16(8, 16))(random_bf16(2, 16), out_dtype=torch.float32)
    with pytest.raises(TypeError, match=r"weight must be torch.bfloat16, got torch.float32"):
        cpu.PackedLinear(torch.zeros(4, 4))
    with pytest.raises(ValueError, match=r"bias must be \[8\], got \[3\]"):
        cpu.PackedLinear(random_bf16(8, 16), torch.zeros(3))
    with pytest.raises(TypeError, match=r"x must be torch.bfloat16, got torch.float32"):
        packed(torch.zeros(2, 16))
    with pytest.raises(ValueError, match="x must end in 16 features"):
        packed(random_bf16(2, 17))
    with pytest.raises(ValueError, match=r"out must be contiguous \[2, 8\]"):
        packed(random_bf16(2, 16), out=torch.zeros(2, 9))
