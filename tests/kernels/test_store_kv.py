"""store_kv: reference against plain assignments, Triton kernel against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from batchgen_kernels.store_kv import QUANTIZED_MAX, store_kv_launch, store_kv_reference, store_kv_triton

from tests.kernels.dtypes import FLOATS

IMPLEMENTATIONS = [store_kv_reference, store_kv_triton]
QUANTIZED = list(QUANTIZED_MAX)
NUM_BLOCKS, BLOCK_SIZE = 5, 4


class Case(NamedTuple):
    """Arguments of store_kv, in order."""

    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slots: torch.Tensor
    k_scales: torch.Tensor | None
    v_scales: torch.Tensor | None


def case(
    num_tokens: int, dtype: torch.dtype, cache_dtype: torch.dtype, heads: int = 3, dims: tuple[int, int] = (8, 5)
) -> Case:
    """Tokens at distinct shuffled slots of poisoned caches; every third token is not stored."""
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:num_tokens]
    slots[::3] = -1
    merged = torch.randn(num_tokens, heads + 2, dims[0]).to(dtype)
    caches = [torch.full((NUM_BLOCKS, heads, BLOCK_SIZE, dim), 99.0).to(cache_dtype) for dim in dims]
    scales = [torch.full((NUM_BLOCKS, heads, BLOCK_SIZE), -9.0) if cache_dtype in QUANTIZED else None for _ in dims]
    return Case(merged[:, 1:-1], torch.randn(num_tokens, heads, dims[1]).to(dtype), *caches, slots, *scales)


@pytest.mark.parametrize("store", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 20])
@pytest.mark.parametrize("dtype", FLOATS)
def test_each_token_lands_in_its_slot_and_nothing_else_changes(
    store: Callable[..., None], num_tokens: int, dtype: torch.dtype
) -> None:
    args = case(num_tokens, dtype, dtype)
    expected_k, expected_v = args.k_cache.clone(), args.v_cache.clone()
    for token, slot in enumerate(args.slots.tolist()):
        if slot >= 0:
            expected_k[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = args.k[token]
            expected_v[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = args.v[token]
    store(*args)
    assert torch.equal(args.k_cache, expected_k)
    assert torch.equal(args.v_cache, expected_v)


@pytest.mark.parametrize("store", IMPLEMENTATIONS)
@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_quantized_values_times_scale_are_near_the_input(store: Callable[..., None], cache_dtype: torch.dtype) -> None:
    args = case(12, torch.float32, cache_dtype)
    args.k[4] = 0.0
    store(*args)
    assert args.k_scales is not None
    for token, slot in enumerate(args.slots.tolist()):
        if slot >= 0:
            place = (slot // BLOCK_SIZE, slice(None), slot % BLOCK_SIZE)
            scale = args.k_scales[place].unsqueeze(-1)
            error = (args.k_cache[place].float() * scale - args.k[token]).abs()
            largest = args.k[token].abs().amax(-1, keepdim=True)
            # int8 has steps of largest / 127; e4m3 has 3 bits after the leading one.
            assert (error <= largest * (0.5 / 127 if cache_dtype == torch.int8 else 2.0**-4) + 1e-7).all()


@pytest.mark.parametrize("cache_dtype", QUANTIZED)
@pytest.mark.parametrize("dtype", FLOATS)
def test_triton_quantizes_as_the_reference(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    args = case(20, dtype, cache_dtype, heads=2, dims=(64, 80))
    expected = Case(*(None if part is None else part.clone() for part in args))
    store_kv_triton(*args)
    store_kv_reference(*expected)
    for name in ("k", "v"):
        assert torch.equal(getattr(args, f"{name}_scales"), getattr(expected, f"{name}_scales"))
        codes, answer = getattr(args, f"{name}_cache").float(), getattr(expected, f"{name}_cache").float()
        assert torch.equal(codes, answer)


@pytest.mark.parametrize("store", [store_kv_reference, store_kv_launch])
def test_a_quantized_cache_without_scales_is_refused(store: Callable[..., None]) -> None:
    args = case(2, torch.float32, torch.int8)
    with pytest.raises(ValueError, match="needs k_scales and v_scales"):
        store(*args._replace(k_scales=None, v_scales=None))
