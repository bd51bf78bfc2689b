"""Sums whose order is fixed."""

from __future__ import annotations

import pytest
import torch
from batchgen_kernels.reduction import tree_sum, tree_sum_


@pytest.mark.parametrize("terms", [1, 2, 3, 64, 1000])
def test_tree_sum_is_the_sum(terms: int) -> None:
    x = torch.randn(3, terms)
    torch.testing.assert_close(tree_sum(x).double(), x.double().sum(-1), rtol=1e-6, atol=1e-5)


def test_a_row_is_summed_the_same_way_in_any_company() -> None:
    x = torch.randn(500, 1000)
    assert torch.equal(tree_sum(x)[123:124], tree_sum(x[123:124]))


def test_summing_in_place_has_the_same_bits() -> None:
    x = torch.randn(7, 256)
    assert torch.equal(tree_sum_(x.clone()), tree_sum(x))
