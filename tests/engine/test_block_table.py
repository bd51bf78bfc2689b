from __future__ import annotations

import pytest

from batchgen.engine.block_pool import BlockPool, OutOfBlocks
from batchgen.engine.block_table import BlockCopy, BlockTable


def table_of(pool: BlockPool, num_tokens: int) -> BlockTable:
    table = BlockTable(pool)
    table.append_slots(num_tokens)
    return table


def check(pool: BlockPool, *tables: BlockTable) -> None:
    pool.check_integrity(table.block_ids for table in tables)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_table_holds_the_fewest_blocks_that_hold_its_tokens(num_tokens: int, num_blocks: int) -> None:
    pool = BlockPool(8, 4)
    assert len(table_of(pool, num_tokens).block_ids) == num_blocks
    one_by_one = BlockTable(pool)
    for _ in range(num_tokens):
        one_by_one.append_slots(1)
    assert len(one_by_one.block_ids) == num_blocks


def test_a_fork_only_counts_references() -> None:
    pool = BlockPool(4, 4)
    parent = table_of(pool, 10)
    child = parent.fork()
    assert child.block_ids == parent.block_ids
    assert child.num_tokens == 10
    assert pool.num_held == 3
    assert pool.num_shared == 3
    check(pool, parent, child)


def test_a_forked_sequence_copies_only_its_last_partial_block() -> None:
    pool = BlockPool(8, 4)
    parent = table_of(pool, 10)
    child = parent.fork()
    tail = parent.block_ids[-1]
    assert child.append_slots(1) == BlockCopy(src=tail, dst=child.block_ids[-1])
    assert child.block_ids[:-1] == parent.block_ids[:-1]
    assert child.block_ids[-1] != tail
    pool.end_step()
    check(pool, parent, child)


def test_the_last_owner_writes_in_place() -> None:
    pool = BlockPool(8, 4)
    parent = table_of(pool, 10)
    child = parent.fork()
    assert child.append_slots(1) is not None
    assert parent.append_slots(1) is None
    twin = parent.fork()
    twin.free()
    assert parent.append_slots(1) is None


@pytest.mark.parametrize("num_samples", [1, 2, 3, 8])
def test_n_samples_cost_n_minus_1_copies_of_one_block(num_samples: int) -> None:
    pool = BlockPool(16, 4)
    root = table_of(pool, 6)
    tables = [root, *(root.fork() for _ in range(num_samples - 1))]
    copies = [copy for table in tables if (copy := table.append_slots(1)) is not None]
    assert len(copies) == num_samples - 1
    assert len({copy.dst for copy in copies}) == num_samples - 1
    pool.end_step()
    check(pool, *tables)


def test_samples_of_a_prompt_that_ends_on_a_block_border_copy_nothing() -> None:
    pool = BlockPool(16, 4)
    root = table_of(pool, 8)
    tables = [root, *(root.fork() for _ in range(3))]
    assert [table.append_slots(1) for table in tables] == [None] * 4
    assert len({table.block_ids[-1] for table in tables}) == 4
    check(pool, *tables)


@pytest.mark.parametrize("count", [4, 5, 50])
def test_out_of_blocks_changes_nothing_whatever_was_missing(count: int) -> None:
    pool = BlockPool(4, 4)
    parent = table_of(pool, 10)
    child = parent.fork()
    before = (list(child.block_ids), child.num_tokens, pool.num_free, pool.num_shared)
    # One free block: enough for the copy, not for the copy and a new block.
    with pytest.raises(OutOfBlocks):
        child.append_slots(count)
    assert (list(child.block_ids), child.num_tokens, pool.num_free, pool.num_shared) == before
    check(pool, parent, child)
    assert child.append_slots(2) is not None


def test_a_copy_counts_as_a_block_that_is_needed() -> None:
    pool = BlockPool(3, 4)
    parent = table_of(pool, 10)
    child = parent.fork()
    with pytest.raises(OutOfBlocks):
        child.append_slots(1)
    parent.free()
    assert child.append_slots(1) is None, "the only owner left needs no copy"


def test_a_copy_source_that_loses_its_last_owner_waits_for_the_end_of_the_step() -> None:
    pool = BlockPool(4, 4)
    parent = table_of(pool, 2)
    child = parent.fork()
    copy = child.append_slots(1)
    assert copy is not None
    parent.free()
    newcomer = table_of(pool, 8)
    assert copy.src not in newcomer.block_ids
    pool.end_step()
    assert table_of(pool, 4).block_ids[0] == copy.src


def test_an_adopted_prefix_is_shared_and_full() -> None:
    pool = BlockPool(8, 4)
    writer = table_of(pool, 10)
    reader = BlockTable(pool)
    reader.adopt(list(writer.block_ids[:2]))
    assert reader.num_tokens == 8
    assert reader.append_slots(5) is None
    assert reader.block_ids[:2] == writer.block_ids[:2]
    check(pool, writer, reader)


def test_the_tail_is_freed_first_so_that_prefixes_live_longest() -> None:
    pool = BlockPool(3, 4)
    table = table_of(pool, 12)
    ids = list(table.block_ids)
    table.free()
    assert [pool.allocate() for _ in range(3)] == ids[::-1]
    assert table.num_tokens == 0
    assert not table.block_ids
