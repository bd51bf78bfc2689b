"""copy_blocks: copy whole KV blocks, in every layer's caches at once.

cache[dst] = cache[src] for each pair (src, dst) and each cache; no dst is a src or another pair's dst.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def copy_blocks_reference(caches: Sequence[Tensor], pairs_P2: Tensor) -> None:
    """Copy in torch; see `copy_blocks`."""
    src_P, dst_P = pairs_P2.unbind(1)
    for cache in caches:
        cache[dst_P] = cache[src_P]


def copy_blocks(caches: Sequence[Tensor], pairs_P2: Tensor) -> None:
    """Copy block src to block dst for each row (src, dst) of `pairs_P2` (int64) in each of `caches` [N, ...]."""
    if pairs_P2.shape[0]:
        copy_blocks_reference(caches, pairs_P2)
