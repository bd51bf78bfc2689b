"""One sequence's view of the paged KV cache."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from batchgen.engine.block_pool import BlockPool, OutOfBlocks


class BlockCopy(NamedTuple):
    """Copy one whole KV block, before this step writes."""

    src: int
    dst: int


class BlockTable:
    """The ordered blocks of one sequence; a block stays shared until it is written.

    `num_tokens` slots are in use; slot i of the sequence is slot i % block_size of `block_ids[i // block_size]`.
    `room` more can be used as they are: they lie in a tail that no other table shares. 0 may also mean: not known.
    `version` counts the changes of `block_ids`.
    """

    __slots__ = ("block_ids", "num_tokens", "pool", "room", "version")

    def __init__(self, pool: BlockPool, block_ids: array[int] | None = None, num_tokens: int = 0) -> None:
        self.pool = pool
        self.block_ids: array[int] = array("i") if block_ids is None else block_ids
        self.num_tokens = num_tokens
        self.room = self.version = 0

    def append_slots(self, count: int) -> BlockCopy | None:
        """Make the next `count` >= 1 slots writable; on OutOfBlocks nothing has changed.

        Only the first of them can lie in a block that others share, so there is at most one copy.
        """
        num_tokens = self.num_tokens + count
        if count <= self.room:
            self.num_tokens = num_tokens
            self.room -= count
            return None
        pool = self.pool
        block_ids = self.block_ids
        num_new = -(-num_tokens // pool.block_size) - len(block_ids)
        partial = self.num_tokens % pool.block_size != 0
        copy_tail = partial and pool.is_shared(block_ids[-1])
        if num_new + copy_tail > pool.num_free:
            raise OutOfBlocks
        copy = None
        if copy_tail:
            shared = block_ids[-1]
            copy = BlockCopy(src=shared, dst=pool.allocate())
            block_ids[-1] = copy.dst
            pool.protect_copy_source(shared)
            pool.free(shared)
        for _ in range(num_new):
            block_ids.append(pool.allocate())
        self.version += num_new > 0 or copy_tail
        self.num_tokens = num_tokens
        self.room = len(block_ids) * pool.block_size - num_tokens
        return copy

    def adopt(self, block_ids: list[int]) -> None:
        """Begin an empty table with full blocks that others have written."""
        assert not self.block_ids, "only an empty table can adopt a prefix"
        for block_id in block_ids:
            self.pool.share(block_id)
        self.block_ids.extend(block_ids)
        self.version += 1
        self.num_tokens = len(block_ids) * self.pool.block_size

    def fork(self) -> BlockTable:
        """A second table over the same blocks; costs reference counts only."""
        for block_id in self.block_ids:
            self.pool.share(block_id)
        self.room = 0
        return BlockTable(self.pool, self.block_ids[:], self.num_tokens)

    def free(self) -> None:
        """Give all blocks back, the tail first, so that cached prefixes outlive their continuations."""
        for block_id in reversed(self.block_ids):
            self.pool.free(block_id)
        del self.block_ids[:]
        self.version += 1
        self.num_tokens = self.room = 0


def blocks_to_append(tables: Iterable[BlockTable]) -> int:
    """Blocks that one more slot in each of `tables` takes; the last owner of a shared tail needs no copy of it."""
    num_new = 0
    writers: Counter[int] = Counter()
    pool: BlockPool | None = None
    for table in tables:
        pool = table.pool
        if table.num_tokens == len(table.block_ids) * pool.block_size:
            num_new += 1
        else:
            writers[table.block_ids[-1]] += 1
    if pool is None:
        return 0
    return num_new + sum(count - (pool.ref_count(tail) == count) for tail, count in writers.items())
