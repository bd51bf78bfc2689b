"""Which prompts can be admitted at all, and in which order."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

import numpy as np

from batchgen.engine.block_pool import BlockPool
from batchgen.engine.sequence import SequenceGroup
from batchgen.records import RowError


def admission_order(groups: Iterable[SequenceGroup], block_size: int) -> list[SequenceGroup]:
    """Prompts with a common first block stand together, in radix order; longer answers start earlier.

    Radix order makes every shared prefix a contiguous run, so its blocks are in use when the next prompt wants them.
    Runs are ordered by their largest max_tokens, falling, since a long answer begun last would finish alone; equal
    ones keep the order of arrival.
    """
    # Big-endian bytes compare as the id lists would, at the speed of memcmp.
    keyed = [(np.asarray(group.prompt_token_ids, dtype=">u4").tobytes(), group) for group in groups]
    keyed.sort(key=lambda pair: (pair[0], pair[1].prompt_index))
    runs = [[group for _, group in run] for _, run in groupby(keyed, key=lambda pair: _first_block(pair, block_size))]
    runs.sort(key=lambda run: (-max(group.max_tokens for group in run), min(group.prompt_index for group in run)))
    return [group for run in runs for group in run]


def _first_block(pair: tuple[bytes, SequenceGroup], block_size: int) -> bytes | int:
    key, group = pair
    # A prompt shorter than a block shares nothing: it is a run of its own.
    return key[: 4 * block_size] if group.num_prompt_tokens > block_size else group.prompt_index


def check_capacity(group: SequenceGroup, pool: BlockPool, max_sequences: int) -> RowError | None:
    """Why the group could not run in this pool even if it were alone; None where it can, or where nobody knows yet."""
    places = group.num_places
    if places > max_sequences:
        return RowError("kv_capacity", f"{places} beams are more than the {max_sequences} of engine.max_sequences")
    # An open end may come early: such a row is tried, unless not even its prompt fits.
    max_tokens = 0 if group.params.max_tokens is None else group.max_tokens
    shared, tail = divmod(group.num_prompt_tokens, pool.block_size)
    # Beams share the prompt's full blocks; each has a tail, and one more block while it is copied.
    copied = places if places > 1 and max_tokens > 0 else 0
    num_blocks = shared + places * -(-(tail + max_tokens) // pool.block_size) + copied
    if num_blocks <= pool.num_blocks:
        return None
    message = (
        f"the prompt's {group.num_prompt_tokens} tokens and max_tokens {max_tokens} need {num_blocks} blocks, "
        f"and the KV cache has {pool.num_blocks}; raise engine.kv_cache_memory or lower sampling.max_tokens"
    )
    return RowError("kv_capacity", message)
