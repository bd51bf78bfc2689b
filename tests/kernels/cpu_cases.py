"""Paged caches with known contents, for the tests of the C++ kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from batchgen_kernels import cpu
from torch import Tensor

needs_kernels = pytest.mark.skipif(not cpu.is_available(), reason="the C++ kernels are not built")


class Geometry(NamedTuple):
    """Head sizes and counts of one attention layer, and its block size."""

    head_dim_k: int = 64
    head_dim_v: int = 64
    num_heads: int = 9
    num_kv_heads: int = 3
    block_size: int = 16


class PagedCase(NamedTuple):
    """The arguments of paged_attention for some sequences, whose keys and values are stored already."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    query_starts: Tensor
    context_lens: Tensor
    options: dict[str, Any]

    def attend(self, **overrides: Any) -> Tensor:
        """Run the C++ kernel on the case as it stands."""
        return cpu.paged_attention(*self[:6], **{**self.options, **overrides})

    def of_sequences(self, chosen: list[int]) -> PagedCase:
        """The same caches with only the chosen sequences in the call."""
        spans = [range(int(self.query_starts[s]), int(self.query_starts[s + 1])) for s in chosen]
        counts = torch.tensor([0, *(len(span) for span in spans)])
        return self._replace(
            q=self.q[[t for span in spans for t in span]],
            block_tables=self.block_tables[chosen],
            query_starts=counts.cumsum(0).int(),
            context_lens=self.context_lens[chosen],
        )

    def rows_of(self, out: Tensor, sequence: int) -> Tensor:
        """The rows of `out` that belong to one sequence."""
        return out[int(self.query_starts[sequence]) : int(self.query_starts[sequence + 1])]


def shuffled_tables(context_lens: list[int], block_size: int, *, shared_tokens: int = 0, seed: int = 0) -> Tensor:
    """Block tables [S, B] in random order; the first `shared_tokens` (whole blocks) of all lie in the same blocks."""
    width = max(-(-length // block_size) for length in context_lens)
    shuffle = torch.randperm(len(context_lens) * width, generator=torch.Generator().manual_seed(seed))
    tables = shuffle.view(len(context_lens), width).int()
    tables[:, : shared_tokens // block_size] = tables[0, : shared_tokens // block_size]
    return tables


def paged_case(
    context_lens: list[int],
    query_lens: list[int],
    dtype: torch.dtype = torch.float32,
    geometry: Geometry = Geometry(),  # noqa: B008 (immutable)
    *,
    kv_dtype: torch.dtype | None = None,
    shared_tokens: int = 0,
    block_seed: int = 0,
    **options: Any,
) -> PagedCase:
    """Random keys, values and queries, equal for equal arguments but `block_seed`; slots never written hold NaN."""
    dim_k, dim_v, heads, kv_heads, block_size = geometry
    random = torch.Generator().manual_seed(1)
    tables = shuffled_tables(context_lens, block_size, shared_tokens=shared_tokens, seed=block_seed)
    cache_shape = (tables.numel(), kv_heads, block_size)
    stored = kv_dtype or dtype
    unwritten = float("nan") if stored.is_floating_point else 99
    k_cache = torch.full((*cache_shape, dim_k), unwritten, dtype=stored)
    v_cache = torch.full((*cache_shape, dim_v), unwritten, dtype=stored)
    if kv_dtype == torch.int8:
        options |= {name: torch.full(cache_shape, float("nan")) for name in ("k_scales", "v_scales")}
    scales = (options.get("k_scales"), options.get("v_scales"))
    prefix = [torch.randn(shared_tokens, kv_heads, dim, generator=random) for dim in (dim_k, dim_v)]
    for table, length in zip(tables, context_lens, strict=True):
        k, v = (torch.randn(length, kv_heads, dim, generator=random) for dim in (dim_k, dim_v))
        k[:shared_tokens], v[:shared_tokens] = prefix
        positions = torch.arange(length)
        slots = table.long()[positions // block_size] * block_size + positions % block_size
        cpu.store_kv(k.to(dtype), v.to(dtype), k_cache, v_cache, slots, *scales)
    q = torch.randn(sum(query_lens), heads, dim_k, generator=random).to(dtype)
    query_starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    options = {"scale": dim_k**-0.5, **options}
    return PagedCase(q, k_cache, v_cache, tables, query_starts, torch.tensor(context_lens).int(), options)
