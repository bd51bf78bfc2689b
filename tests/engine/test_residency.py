"""Sequences come into the block pool with what is cached, and go without a trace."""

from __future__ import annotations

from array import array

import pytest

from batchgen.engine.block_pool import BlockPool
from batchgen.engine.prefix_cache import CachedBlock, PrefixCache
from batchgen.engine.residency import Residency
from batchgen.engine.sequence import Sequence, SequenceGroup
from batchgen.sampling_params import SamplingParams

SIZE = 4


def sequence_of(num_tokens: int, **params: int) -> Sequence:
    ids = array("i", range(num_tokens))
    group = SequenceGroup(0, ids, SamplingParams(**params), 0, 0, 1, 8)  # type: ignore[arg-type]
    if group.params.prompt_logprobs is not None:
        group.prompt_logprobs = [None] * num_tokens
    group.sequences.append(group.new_sequence(0))
    return group.sequences[0]


def make(num_blocks: int = 8, *, caching: bool = True) -> Residency:
    pool = BlockPool(num_blocks, SIZE)
    return Residency(pool, PrefixCache(pool) if caching else None)


def blocks_of(sequence: Sequence) -> list[int]:
    assert sequence.table is not None
    return sequence.table.block_ids.tolist()


def compute(blocks: Residency, sequence: Sequence, end: int) -> list[CachedBlock]:
    """Take slots up to token `end`, as a step would; returns what became findable."""
    assert sequence.table is not None
    sequence.table.append_slots(end - sequence.table.num_tokens)
    return blocks.publish(sequence, end)


def enter(blocks: Residency, num_tokens: int) -> Sequence:
    """A sequence that is inside, with all its full blocks to be found."""
    sequence = sequence_of(num_tokens)
    assert blocks.enter(sequence)
    compute(blocks, sequence, num_tokens)
    return sequence


def test_who_enters_holds_no_block_before_it_writes() -> None:
    blocks = make()
    sequence = sequence_of(10)
    assert blocks.enter(sequence)
    assert blocks_of(sequence) == []
    assert (sequence.num_computed_tokens, blocks.num_cached_tokens) == (0, 0)


@pytest.mark.parametrize(("spare", "fits"), [(0, True), (2, True), (3, False)])
def test_blocks_that_others_want_soon_are_left_to_them(spare: int, fits: bool) -> None:
    blocks = make(num_blocks=8)
    enter(blocks, 9)
    # Three of the five that are free, after sharing two.
    assert blocks.enter(sequence_of(18), spare) == fits
    assert blocks.pool.num_free == 5


def test_who_comes_second_shares_the_full_blocks_before_its_last_token() -> None:
    blocks = make()
    first, second = enter(blocks, 12), sequence_of(12)
    assert blocks.enter(second)
    # Three blocks are full, but the last token is computed anew for its logits.
    assert blocks_of(second) == blocks_of(first)[:2]
    assert (second.num_computed_tokens, second.group.cached_tokens, blocks.num_cached_tokens) == (8, 8, 8)


def test_who_does_not_fit_has_taken_nothing() -> None:
    blocks = make(num_blocks=4)
    enter(blocks, 9)
    late = sequence_of(17)
    assert not blocks.enter(late)
    assert (late.table, late.chain, late.num_computed_tokens) == (None, [], 0)
    assert blocks.pool.num_free == 1
    blocks.pool.check_integrity([[0, 1, 2]])


def test_who_leaves_gives_everything_back_and_may_find_it_again() -> None:
    blocks = make()
    sequence = enter(blocks, 9)
    before = blocks_of(sequence)
    blocks.leave(sequence)
    assert (sequence.table, sequence.chain, sequence.num_computed_tokens) == (None, [], 0)
    assert blocks.pool.num_free == 8
    assert blocks.enter(sequence)
    assert blocks_of(sequence) == before[:2]
    blocks.leave(sequence)
    blocks.leave(sequence)
    assert blocks.pool.num_free == 8


def test_a_prompt_whose_own_log_probabilities_are_wanted_is_computed_whole() -> None:
    blocks = make()
    enter(blocks, 9)
    scored = sequence_of(9, prompt_logprobs=0)
    assert blocks.enter(scored)
    assert scored.num_computed_tokens == 0


def test_only_new_blocks_are_reported_and_each_once() -> None:
    blocks = make()
    sequence = sequence_of(9)
    blocks.enter(sequence)
    assert [len(compute(blocks, sequence, end)) for end in (3, 7, 8, 9)] == [0, 1, 1, 0]
    # An equal block under another id: the known one stays.
    twin = sequence_of(9, prompt_logprobs=0)
    blocks.enter(twin)
    assert compute(blocks, twin, 9) == []
    assert twin.chain == sequence.chain


def test_what_is_withdrawn_is_found_no_more() -> None:
    blocks = make()
    sequence = sequence_of(9)
    blocks.enter(sequence)
    blocks.withdraw(compute(blocks, sequence, 9))
    late = sequence_of(9)
    assert blocks.enter(late)
    assert late.num_computed_tokens == 0


@pytest.mark.parametrize("num_tokens", [1, 4, 9])
def test_without_a_cache_nothing_is_shared(num_tokens: int) -> None:
    blocks = make(caching=False)
    first, second = enter(blocks, num_tokens), enter(blocks, num_tokens)
    assert not set(blocks_of(first)) & set(blocks_of(second))
    blocks.withdraw([])
    assert blocks.num_cached_tokens == 0
