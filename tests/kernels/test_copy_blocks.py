"""copy_blocks: reference and Triton kernel against plain assignments."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from batchgen_kernels.copy_blocks import copy_blocks, copy_blocks_reference, copy_blocks_triton

IMPLEMENTATIONS = [copy_blocks_reference, copy_blocks_triton]
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8]


@pytest.mark.parametrize("copy", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_every_cache_are_copied_and_nothing_else(
    copy: Callable[[list[torch.Tensor], torch.Tensor], None], dtype: torch.dtype
) -> None:
    shapes = [(7, 2, 4, 8), (7, 2, 4, 6), (7, 3, 16, 64), (7, 1, 1, 1)]
    caches = [(torch.randn(shape) * 50).to(dtype) for shape in shapes]
    expected = [cache.clone() for cache in caches]
    pairs = [(0, 3), (0, 6), (5, 1)]
    for cache in expected:
        for src, dst in pairs:
            cache[dst] = cache[src]
    copy(caches, torch.tensor(pairs))
    for cache, answer in zip(caches, expected, strict=True):
        assert torch.equal(cache.view(torch.uint8), answer.view(torch.uint8))


@pytest.mark.parametrize("copy", [copy_blocks, *IMPLEMENTATIONS])
def test_no_pairs_copy_nothing(copy: Callable[[list[torch.Tensor], torch.Tensor], None]) -> None:
    cache = torch.randn(3, 1, 4, 8)
    before = cache.clone()
    copy([cache], torch.zeros(0, 2, dtype=torch.int64))
    assert torch.equal(cache, before)
