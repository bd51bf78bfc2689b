"""Allocate, append, fork, free, preempt, evict in any order, against a model that keeps every token in memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batchgen.engine.block_pool import BlockPool, OutOfBlocks
from batchgen.engine.block_table import BlockCopy, BlockTable
from batchgen.engine.prefix_cache import CachedBlock, PrefixCache
from tests.engine.fakes import state_of

# Few different tokens, so that prefixes are often equal.
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@dataclass(eq=False)
class Row:
    """A sequence as the truth knows it: its tokens."""

    tokens: list[int]
    table: BlockTable
    chain: list[CachedBlock] = field(default_factory=list)
    took_part: bool = False
    """In the step that is being planned; a row takes part once, and does not leave before the step has run."""


class Paging(RuleBasedStateMachine):
    """Plans steps by the rules of the scheduler; `run_step` and `fail_step` end them."""

    @initialize(num_blocks=st.integers(4, 32), block_size=st.sampled_from([1, 2, 4]), collides=st.booleans())
    def make(self, num_blocks: int, block_size: int, collides: bool) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.cache = PrefixCache(self.pool, (lambda _, tokens: sum(tokens)) if collides else None)
        self.memory: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.rows: list[Row] = []
        self.preempted: list[list[int]] = []
        self.copies: list[BlockCopy] = []
        self.writes: list[tuple[Row, int]] = []
        self.published: list[CachedBlock] = []

    # ---- planning

    @rule(tokens=TOKENS)
    def admit(self, tokens: list[int]) -> None:
        size = self.pool.block_size
        free_before = self.pool.num_free
        chain = self.cache.match(tokens, len(tokens) - 1)
        assert len(chain) * size < len(tokens), "the last token is never served"
        table = BlockTable(self.pool)
        table.adopt([link.block_id for link in chain])
        needed = -(-len(tokens) // size) - len(chain)
        try:
            copy = table.append_slots(len(tokens) - len(chain) * size)
        except OutOfBlocks:
            assert needed > self.pool.num_free
            table.free()
            assert self.pool.num_free == free_before
            return
        assert copy is None, "whole blocks are adopted, so nothing is copied"
        row = Row(list(tokens), table, chain, took_part=True)
        self.writes.extend((row, position) for position in range(len(chain) * size, len(tokens)))
        self.rows.append(row)
        self.publish(row)

    @precondition(lambda self: self.preempted)
    @rule(data=st.data())
    def readmit(self, data: st.DataObject) -> None:
        tokens = self.preempted.pop(data.draw(st.integers(0, len(self.preempted) - 1)))
        before = len(self.rows)
        self.admit(tokens)
        if len(self.rows) == before:
            self.preempted.append(tokens)

    @precondition(lambda self: any(not row.took_part for row in self.rows))
    @rule(data=st.data(), token=st.integers(0, 1))
    def append(self, data: st.DataObject, token: int) -> None:
        row = data.draw(st.sampled_from([row for row in self.rows if not row.took_part]))
        tail, partial = row.table.block_ids[-1], len(row.tokens) % self.pool.block_size != 0
        owners = sum(tail in other.table.block_ids for other in self.rows)
        before, free = list(row.table.block_ids), self.pool.num_free
        takes_block = not partial or owners > 1
        try:
            copy = row.table.append_slots(1)
        except OutOfBlocks:
            assert takes_block
            assert free == 0
            assert list(row.table.block_ids) == before
            return
        assert self.pool.num_free == free - takes_block
        assert (copy is not None) == (partial and owners > 1), "only a shared tail is copied"
        if copy is not None:
            assert copy == BlockCopy(tail, row.table.block_ids[-1])
            self.copies.append(copy)
        row.tokens.append(token)
        row.took_part = True
        self.writes.append((row, len(row.tokens) - 1))
        self.publish(row)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.rows))
        free = self.pool.num_free
        self.rows.append(Row(parent.tokens[:], parent.table.fork(), parent.chain[:], took_part=True))
        assert self.pool.num_free == free, "a fork costs no block"

    @precondition(lambda self: any(not row.took_part for row in self.rows))
    @rule(data=st.data(), comes_back=st.booleans())
    def leave(self, data: st.DataObject, comes_back: bool) -> None:
        row = data.draw(st.sampled_from([row for row in self.rows if not row.took_part]))
        row.table.free()
        self.rows.remove(row)
        if comes_back:
            self.preempted.append(row.tokens)

    @precondition(lambda self: self.pool.num_free)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """Somebody else takes some free blocks, writes into them and gives them back."""
        taken = [self.pool.allocate() for _ in range(data.draw(st.integers(1, self.pool.num_free)))]
        for block in taken:
            self.memory[block] = [None] * self.pool.block_size
            self.pool.free(block)

    # ---- ends of a step

    @rule()
    def run_step(self) -> None:
        assert not {copy.src for copy in self.copies} & {copy.dst for copy in self.copies}
        for src, dst in self.copies:
            self.memory[dst] = self.memory[src][:]
        size = self.pool.block_size
        for row, position in self.writes:
            block = row.table.block_ids[position // size]
            self.memory[block][position % size] = state_of(row.tokens[: position + 1])
        self.end_step()
        for row in self.rows:
            for position in range(len(row.tokens)):
                held = self.memory[row.table.block_ids[position // size]][position % size]
                assert held == state_of(row.tokens[: position + 1]), f"slot {position} of {row.tokens}"

    @rule()
    def fail_step(self) -> None:
        """The device wrote anything, or nothing, into the blocks of the step."""
        size = self.pool.block_size
        for row, position in self.writes:
            self.memory[row.table.block_ids[position // size]][position % size] = None
        for _, dst in self.copies:
            self.memory[dst] = [None] * size
        for row in self.rows:
            row.table.free()
            self.preempted.append(row.tokens)
        self.rows.clear()
        for link in self.published:
            self.cache.withdraw(link)
        self.end_step()
        assert self.pool.num_free == self.pool.num_blocks

    def end_step(self) -> None:
        self.pool.end_step()
        self.copies.clear()
        self.writes.clear()
        self.published.clear()
        for row in self.rows:
            row.took_part = False

    def publish(self, row: Row) -> None:
        size = self.pool.block_size
        for index in range(len(row.chain), len(row.tokens) // size):
            tokens = tuple(row.tokens[index * size : (index + 1) * size])
            link, is_new = self.cache.publish(row.chain[-1] if row.chain else None, tokens, row.table.block_ids[index])
            row.chain.append(link)
            if is_new:
                self.published.append(link)

    # ---- what always holds

    @invariant()
    def counts_are_right(self) -> None:
        self.pool.check_integrity(row.table.block_ids for row in self.rows)
        held = {block for row in self.rows for block in row.table.block_ids}
        waiting = {copy.src for copy in self.copies} - held
        assert self.pool.num_free == self.pool.num_blocks - len(held) - len(waiting)

    @invariant()
    def no_slot_beyond_the_last_block_is_held(self) -> None:
        for row in self.rows:
            assert row.table.num_tokens == len(row.tokens)
            assert len(row.table.block_ids) == -(-len(row.tokens) // self.pool.block_size)

    @invariant()
    def cached_blocks_hold_their_tokens(self) -> None:
        if self.writes or self.copies:
            return
        size = self.pool.block_size
        for block, link in self.cache._by_block.items():
            tokens: list[int] = []
            node: CachedBlock | None = link
            while node is not None:
                tokens[:0] = node.tokens
                node = node.parent
            first = len(tokens) - size
            assert self.memory[block] == [state_of(tokens[: first + index + 1]) for index in range(size)]

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.run_step()
            for row in self.rows:
                row.table.free()
            assert self.pool.num_free == self.pool.num_blocks


Paging.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestPaging = Paging.TestCase
