"""Packed products: torch's result, and each row by itself."""

from __future__ import annotations

import pytest
import torch
from batchgen_kernels import cpu
from torch import nn
from transformers.pytorch_utils import Conv1D

from batchgen.engine import linear
from batchgen.engine.linear import PackedLinear, checked_product, pack_linears
from batchgen.errors import ModelError

needs_kernels = pytest.mark.skipif(not cpu.is_available(), reason="bf16 products need the C++ kernels")
DTYPES = [
    pytest.param(torch.float32, id="float32"),
    pytest.param(torch.bfloat16, marks=needs_kernels, id="bfloat16"),
]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(40, 72), Conv1D(24, 72), nn.Linear(24, 40, bias=False)])
        self.head = nn.Linear(40, 50, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.body:
            x = layer(x)
        result: torch.Tensor = self.head(x)
        return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 1), (33, 7), (64, 64), (130, 96)])
def test_a_row_is_the_same_bits_whatever_rows_stand_beside_it(
    dtype: torch.dtype, has_bias: bool, num_outputs: int, num_inputs: int
) -> None:
    weight, x = random(num_outputs, num_inputs).to(dtype), random(33, num_inputs, seed=1).to(dtype)
    bias = random(num_outputs, seed=2).to(dtype) if has_bias else None
    product = checked_product("test", weight, bias)
    whole = product(x)
    expected = nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(whole, expected, rtol=0.02 if dtype == torch.bfloat16 else 1e-4, atol=0.05)
    assert whole.dtype == dtype
    for count in (1, 2, 3, 7, 8, 9, 16, 32):
        assert torch.equal(product(x[:count]), whole[:count])
        assert torch.equal(product(x[-count:]), whole[-count:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_layer_is_packed_and_the_head_answers_in_float32(dtype: torch.dtype) -> None:
    model = _Model().to(dtype).requires_grad_(False)
    x = random(2, 5, 40).to(dtype)
    expected = model(x)
    assert pack_linears(model, model.head) == 4
    assert all(isinstance(layer, PackedLinear) for layer in (*model.body, model.head))
    actual = model(x)
    assert (actual.shape, actual.dtype) == (expected.shape, torch.float32)
    torch.testing.assert_close(actual, expected.float(), rtol=0.02, atol=0.02 if dtype == torch.bfloat16 else 1e-5)


def test_a_subclass_that_may_compute_something_else_is_left_alone() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = nn.Sequential(Scaled(8, 8), nn.Linear(8, 8)).requires_grad_(False)
    assert pack_linears(model) == 1
    assert type(model[0]) is Scaled


def test_a_product_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(weight: torch.Tensor, bias: torch.Tensor | None, _: torch.dtype) -> linear.Product:
        return lambda x: nn.functional.linear(x, weight, bias) * 1.001

    monkeypatch.setattr(linear, "_onednn_product", wrong)
    with pytest.raises(ModelError, match=r"layer\.7: the packed product differs from torch's by"):
        checked_product("layer.7", random(16, 16), None)
