from __future__ import annotations

import sys

import pytest

from batchgen.engine.block_pool import BlockPool, OutOfBlocks


def test_blocks_are_handed_out_in_the_order_in_which_they_were_freed() -> None:
    pool = BlockPool(4, 16)
    first, second, third = pool.allocate(), pool.allocate(), pool.allocate()
    pool.free(second)
    pool.free(first)
    pool.free(third)
    assert [pool.allocate() for _ in range(4)] == [3, second, first, third]


def test_an_empty_pool_says_so_and_changes_nothing() -> None:
    pool = BlockPool(2, 16)
    held = [pool.allocate(), pool.allocate()]
    with pytest.raises(OutOfBlocks):
        pool.allocate()
    pool.check_integrity([held])
    assert pool.num_free == 0


def test_a_block_is_free_when_its_last_owner_leaves() -> None:
    pool = BlockPool(2, 16)
    block = pool.allocate()
    pool.share(block)
    assert pool.is_shared(block)
    assert pool.num_shared == 1
    pool.free(block)
    assert not pool.is_shared(block)
    assert pool.num_shared == 0
    assert pool.num_free == 1
    pool.free(block)
    assert pool.num_free == 2


def test_freeing_a_free_block_is_a_bug_that_shows() -> None:
    pool = BlockPool(2, 16)
    block = pool.allocate()
    pool.free(block)
    with pytest.raises(AssertionError, match=f"block {block} is freed twice"):
        pool.free(block)


def test_the_cache_hears_of_every_block_whose_contents_are_lost() -> None:
    pool = BlockPool(2, 16)
    lost: list[int] = []
    pool.on_evict = lost.append
    block = pool.allocate()
    assert lost == [block]
    pool.free(block)
    pool.share(block)
    assert lost == [block], "a revived block keeps its contents"


def test_a_free_block_comes_back_to_life_when_shared() -> None:
    pool = BlockPool(2, 16)
    block = pool.allocate()
    pool.free(block)
    pool.share(block)
    assert pool.ref_count(block) == 1
    other = pool.allocate()
    assert other != block
    pool.check_integrity([[block], [other]])


def test_a_copy_source_is_not_handed_out_before_the_step_ends() -> None:
    pool = BlockPool(2, 16)
    source = pool.allocate()
    pool.protect_copy_source(source)
    pool.free(source)
    assert pool.num_free == 1
    assert pool.allocate() != source
    with pytest.raises(OutOfBlocks):
        pool.allocate()
    pool.end_step()
    assert pool.allocate() == source


def test_a_copy_source_with_an_owner_stays_held_after_the_step() -> None:
    pool = BlockPool(2, 16)
    source = pool.allocate()
    pool.share(source)
    pool.protect_copy_source(source)
    pool.free(source)
    pool.end_step()
    pool.check_integrity([[source]])
    pool.free(source)
    assert pool.num_free == 2


def test_a_freed_copy_source_may_be_shared_again_within_the_step() -> None:
    pool = BlockPool(2, 16)
    source = pool.allocate()
    pool.protect_copy_source(source)
    pool.free(source)
    pool.share(source)
    pool.check_integrity([[source]])
    pool.end_step()
    pool.check_integrity([[source]])


def test_a_block_freed_by_preemption_is_usable_at_once() -> None:
    pool = BlockPool(1, 16)
    block = pool.allocate()
    pool.free(block)
    assert pool.allocate() == block


def test_a_retired_block_is_reused_first() -> None:
    pool = BlockPool(3, 16)
    blocks = [pool.allocate() for _ in range(3)]
    for block in blocks:
        pool.free(block)
    pool.retire(blocks[2])
    assert pool.allocate() == blocks[2]
    pool.retire(blocks[2])
    assert pool.ref_count(blocks[2]) == 1, "retiring a held block changes nothing"


@pytest.mark.parametrize(
    ("tables", "what"),
    [([], "differ"), ([[0], [0]], "differ"), ([[0, 1]], "differ")],
)
def test_the_integrity_check_sees_a_leak_a_double_owner_and_a_stranger(tables: list[list[int]], what: str) -> None:
    pool = BlockPool(4, 16)
    assert pool.allocate() == 0
    pool.check_integrity([[0]])
    with pytest.raises(AssertionError, match=what):
        pool.check_integrity(tables)


def test_a_pool_without_blocks_or_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="0 blocks of 16 slots"):
        BlockPool(0, 16)
    with pytest.raises(ValueError, match="4 blocks of 0 slots"):
        BlockPool(4, 0)


def test_taking_and_giving_does_not_depend_on_the_size_of_the_pool() -> None:
    def calls(num_blocks: int) -> int:
        """Function calls and lines of one allocate and one free, counted by the interpreter."""
        pool = BlockPool(num_blocks, 16)
        held = [pool.allocate() for _ in range(num_blocks // 2)]
        count = 0

        def trace(*_: object) -> object:
            nonlocal count
            count += 1
            return trace

        sys.settrace(trace)  # type: ignore[arg-type]
        try:
            pool.free(held[0])
            pool.allocate()
        finally:
            sys.settrace(None)
        return count

    assert calls(10) == calls(10_000)
