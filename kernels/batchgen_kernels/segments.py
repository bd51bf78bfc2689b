"""The segment rule of attention, shared by the torch reference, the C++ twins and the Triton kernels.

Every context is cut, counted from its first token, into segments of SEGMENT_TOKENS tokens. For one query and one
segment a partial result (max of the scores, sum of their exponentials, output not yet divided) is computed in one fixed
order, whatever else is in the call; partials are merged in the order of the segments. A segment that lies outside a
query's window is skipped, not masked. So a query's output does not depend on batch, chunk, cache or sharing.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

SEGMENT_TOKENS = 64
"""Tokens per segment; `block_size` must divide it. Part of the fingerprint: other values give other last bits."""


class SharedPrefixes(NamedTuple):
    """Groups of sequences whose first tokens lie in the same blocks, so that attention reads these once per group.

    A hint: it changes what is read, never a bit of the result where the segment rule holds.
    """

    member_starts_G1: Tensor
    """int32 [G + 1]: the sequences of group g are `members_M[member_starts_G1[g] : member_starts_G1[g + 1]]`."""
    members_M: Tensor
    """int32 [M]: indexes into the sequences of the call; a sequence is in one group at most."""
    prefix_lens_G: Tensor
    """int32 [G]: tokens shared, a multiple of SEGMENT_TOKENS, and before every query of the group's members."""


def check_block_size(block_size: int) -> None:
    """Raise ValueError unless whole blocks fill a segment."""
    if block_size < 1 or SEGMENT_TOKENS % block_size:
        raise ValueError(f"block_size must divide {SEGMENT_TOKENS}, got {block_size}")
