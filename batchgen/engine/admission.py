"""The order in which waiting prompts are admitted."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

import numpy as np

from batchgen.engine.sequence import SequenceGroup


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
