from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional

from batchgen.engine.aligned import REGISTER, AlignedFunctions, align_functions, aligned_rows, aligned_size


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_elements", [0, 1, 63, 64, 65, 16385, 32769, 65500, 98301, 200_001])
def test_aligned_sizes_are_the_next_that_share_evenly(threads: int, num_elements: int) -> None:
    size = aligned_size(num_elements)
    assert size >= num_elements
    assert aligned_size(size) == size
    for shares in {1, threads} if size > 16384 else {1}:
        assert size % (REGISTER * shares) == 0


def test_rows_are_added_until_their_elements_are_aligned() -> None:
    assert aligned_rows(3, 64) == 3
    assert aligned_rows(3, 16) == 4
    assert aligned_rows(0, 7) == 0


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("function", [functional.silu, functional.gelu, torch.sigmoid, functional.softplus])
@pytest.mark.parametrize("width", [88, 136, 1000])
def test_a_row_has_the_same_bits_whatever_rows_stand_beside_it(function: object, width: int) -> None:
    x = torch.randn(300, width, generator=torch.Generator().manual_seed(0))
    assert callable(function)
    with AlignedFunctions():
        whole = function(x)
        for count in (1, 2, 5, 33, 241):
            assert torch.equal(function(x[:count]), whole[:count])
    torch.testing.assert_close(whole, function(x))


class _Gate(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(input=x)


def test_only_modules_that_call_a_curved_function_themselves_are_aligned() -> None:
    model = nn.Sequential(nn.Linear(72, 72), _Gate(), nn.ReLU())
    x = torch.randn(5, 72, generator=torch.Generator().manual_seed(0))
    before = model(x)
    assert align_functions(model, lambda: model(x)) == [model[1]]
    torch.testing.assert_close(model(x), before)
