"""copy_blocks: copy whole KV blocks, in every layer's caches at once.

cache[dst] = cache[src] for each pair (src, dst) and each cache; no dst is a src or another pair's dst.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd

import torch
from torch import Tensor

from batchgen_kernels.launch import Launch, jit, runs_on_triton, tl

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
BLOCK_WORDS = 1024


def copy_blocks_reference(caches: Sequence[Tensor], pairs_P2: Tensor) -> None:
    """Copy in torch; see `copy_blocks`."""
    src_P, dst_P = pairs_P2.unbind(1)
    for cache in caches:
        cache[dst_P] = cache[src_P]


@lru_cache(maxsize=8)
def _cache_table(addresses: tuple[int, ...], sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return int64 [caches, 2] on the device: where each cache begins, and the bytes of its blocks."""
    return torch.tensor([addresses, sizes], dtype=torch.int64).t().contiguous().to(device)


@jit
def _copy_blocks_kernel(
    table_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    word_ptr: tl.tensor,
    WORD_BYTES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
) -> None:
    """Copy one block of one cache; `word_ptr` only tells the type of the words."""
    pair = tl.program_id(0)
    cache = tl.program_id(1)
    base = tl.load(table_ptr + cache * 2).to(tl.pointer_type(word_ptr.dtype.element_ty))
    num_words = tl.load(table_ptr + cache * 2 + 1) // WORD_BYTES
    src = tl.multiple_of(base + tl.load(pairs_ptr + pair * 2) * num_words, ALIGNMENT)
    dst = tl.multiple_of(base + tl.load(pairs_ptr + pair * 2 + 1) * num_words, ALIGNMENT)
    for start in range(0, num_words, BLOCK_WORDS):
        word = start + tl.arange(0, BLOCK_WORDS)
        inside = word < num_words
        tl.store(dst + word, tl.load(src + word, mask=inside), mask=inside)


def copy_blocks_launch(caches: Sequence[Tensor], pairs_P2: Tensor, table: Tensor) -> Launch:
    """Describe the launch: one program per pair and cache; the caches must be contiguous."""
    alignment = gcd(16, *(cache[0].nbytes for cache in caches))
    word = WORDS[min(8, alignment)]
    return Launch(
        _copy_blocks_kernel,
        (len(pairs_P2), len(caches)),
        {"table_ptr": table, "pairs_ptr": pairs_P2, "word_ptr": torch.empty(1, dtype=word, device=table.device)},
        {"WORD_BYTES": word.itemsize, "ALIGNMENT": alignment, "BLOCK_WORDS": BLOCK_WORDS},
    )


def copy_blocks_triton(caches: Sequence[Tensor], pairs_P2: Tensor) -> None:
    """Copy by the Triton kernel, all caches in one launch; see `copy_blocks`."""
    addresses = tuple(cache.data_ptr() for cache in caches)
    sizes = tuple(cache[0].nbytes for cache in caches)
    copy_blocks_launch(caches, pairs_P2, _cache_table(addresses, sizes, caches[0].device)).run()


def copy_blocks(caches: Sequence[Tensor], pairs_P2: Tensor) -> None:
    """Copy block src to block dst for each row (src, dst) of `pairs_P2` (int64) in each of `caches` [N, ...]."""
    if len(pairs_P2) and len(caches):
        (copy_blocks_triton if runs_on_triton(caches[0]) else copy_blocks_reference)(caches, pairs_P2)
