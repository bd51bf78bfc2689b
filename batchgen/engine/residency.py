"""Moves sequences into and out of the block pool, sharing what the prefix cache knows."""

from __future__ import annotations

from collections.abc import Iterable

from batchgen.engine.block_pool import BlockPool
from batchgen.engine.block_table import BlockTable
from batchgen.engine.prefix_cache import CachedBlock, PrefixCache
from batchgen.engine.sequence import Sequence


class Residency:
    """A sequence enters with the blocks that are cached, makes those that it fills findable, and leaves with none."""

    def __init__(self, pool: BlockPool, prefix_cache: PrefixCache | None) -> None:
        self.pool = pool
        self.prefix_cache = prefix_cache
        self.num_cached_tokens = 0

    def enter(self, sequence: Sequence, spare: int = 0) -> bool:
        """Share the blocks that are cached, where the others that its tokens need, and `spare` more, are free.

        The others are taken chunk by chunk, so that no block is held before there is something to write into it.
        """
        table = BlockTable(self.pool)
        num_tokens = len(sequence.token_ids)
        # Where the prompt's own log-probabilities are wanted, every token must be computed.
        if self.prefix_cache is not None and not sequence.is_scored:
            # The last token is never served from the cache: its logits are needed to sample.
            sequence.chain = self.prefix_cache.match(sequence.token_ids, num_tokens - 1)
            table.adopt([link.block_id for link in sequence.chain])
        num_cached = table.num_tokens
        if -(-num_tokens // self.pool.block_size) - len(table.block_ids) + spare > self.pool.num_free:
            table.free()
            sequence.chain = []
            return False
        sequence.table = table
        sequence.num_computed_tokens = num_cached
        if sequence.group.age < 0:
            sequence.group.cached_tokens = num_cached
        self.num_cached_tokens += num_cached
        return True

    def publish(self, sequence: Sequence, end: int) -> list[CachedBlock]:
        """Make the blocks before token `end` findable; returns the links that are new.

        Called as the step that fills them is planned, so that later admissions of the same step share them already.
        """
        if self.prefix_cache is None:
            return []
        assert sequence.table is not None
        size = self.pool.block_size
        chain = sequence.chain
        published: list[CachedBlock] = []
        for index in range(len(chain), end // size):
            tokens = tuple(sequence.token_ids[index * size : (index + 1) * size])
            parent = chain[-1] if chain else None
            link, is_new = self.prefix_cache.publish(parent, tokens, sequence.table.block_ids[index])
            chain.append(link)
            if is_new:
                published.append(link)
        return published

    def withdraw(self, links: Iterable[CachedBlock]) -> None:
        """Forget blocks that were published for a step that did not run."""
        if self.prefix_cache is not None:
            for link in links:
                self.prefix_cache.withdraw(link)

    @staticmethod
    def leave(sequence: Sequence) -> None:
        """Give all blocks back; what was computed in them counts no longer."""
        if sequence.table is not None:
            sequence.table.free()
        sequence.table = None
        sequence.chain = []
        sequence.num_computed_tokens = 0
