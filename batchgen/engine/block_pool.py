"""The memory manager of the KV cache: fixed-size blocks with reference counts (PagedAttention, Kwon et al. 2023)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


class OutOfBlocks(Exception):
    """No free block is left; whoever asked has changed nothing."""


class BlockPool:
    """`num_blocks` blocks of `block_size` slots each; ids are 0 .. num_blocks - 1.

    A block is held (reference count > 0) or free. A free block keeps its contents until it is handed out again, so the
    prefix cache can revive it; `on_evict` tells the cache when that chance is gone.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks and slots, got {num_blocks} blocks of {block_size} slots")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.on_evict: Callable[[int], None] | None = None
        self._ref_counts = [0] * num_blocks
        # Insertion order is the order of reuse: the front was freed first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._copy_sources: set[int] = set()
        self.num_shared = 0
        """Blocks with more than one owner."""

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Blocks with an owner, and freed copy sources that wait for the end of the step."""
        return self.num_blocks - len(self._free)

    def ref_count(self, block_id: int) -> int:
        """How many block tables refer to the block."""
        return self._ref_counts[block_id]

    def is_shared(self, block_id: int) -> bool:
        """Whether a writer must copy the block first."""
        return self._ref_counts[block_id] > 1

    def allocate(self) -> int:
        """Take a block with reference count 1: the least recently freed one, whose cached contents are lost."""
        if not self._free:
            raise OutOfBlocks
        block_id, _ = self._free.popitem(last=False)
        self._ref_counts[block_id] = 1
        if self.on_evict is not None:
            self.on_evict(block_id)
        return block_id

    def share(self, block_id: int) -> None:
        """Add an owner; a free block with cached contents comes back to life."""
        if self._ref_counts[block_id] == 0:
            # A copy source that was freed in this step is in neither state; it too comes back.
            self._free.pop(block_id, None)
        self._ref_counts[block_id] += 1
        self.num_shared += self._ref_counts[block_id] == 2

    def free(self, block_id: int) -> None:
        """Drop one owner; the last one makes the block free."""
        count = self._ref_counts[block_id]
        assert count > 0, f"block {block_id} is freed twice"
        self._ref_counts[block_id] = count - 1
        self.num_shared -= count == 2
        if count == 1 and block_id not in self._copy_sources:
            self._free[block_id] = None

    def protect_copy_source(self, block_id: int) -> None:
        """Keep the block from being handed out before `end_step`: its contents are still to be copied."""
        self._copy_sources.add(block_id)

    def end_step(self) -> None:
        """The step's copies have run (or never will): their sources may be reused."""
        for block_id in self._copy_sources:
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
        self._copy_sources.clear()

    def retire(self, block_id: int) -> None:
        """Move a free block to the front: its contents are worth nothing, so it is reused first."""
        if block_id in self._free:
            self._free.move_to_end(block_id, last=False)

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Assert that counts equal the references of all `tables` (block ids each) and free + held == total."""
        expected = [0] * self.num_blocks
        for table in tables:
            for block_id in table:
                expected[block_id] += 1
        assert expected == self._ref_counts, "reference counts differ from the tables' references"
        assert self.num_shared == sum(count > 1 for count in expected)
        for block_id, count in enumerate(expected):
            free = block_id in self._free
            waiting = block_id in self._copy_sources and count == 0
            assert free != (count > 0 or waiting), f"block {block_id} has {count} owners but free is {free}"
