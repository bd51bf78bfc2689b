"""Finds blocks that already hold the K and V of a prefix: a hash chain over full blocks, checked by token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from batchgen.engine.block_pool import BlockPool


class CachedBlock:
    """A full block with known contents: its tokens, after all tokens of its `parent` chain."""

    __slots__ = ("block_id", "hash", "parent", "tokens")

    def __init__(self, block_id: int, block_hash: int, tokens: tuple[int, ...], parent: CachedBlock | None) -> None:
        self.block_id = block_id
        self.hash = block_hash
        self.tokens = tokens
        self.parent = parent


def chain_hash(parent: CachedBlock | None, tokens: tuple[int, ...]) -> int:
    """Hash of all tokens from the start of the sequence to the end of this block (equal in every process)."""
    return hash((0 if parent is None else parent.hash, tokens))


ChainHash = Callable[[CachedBlock | None, tuple[int, ...]], int]


class PrefixCache:
    """Full blocks by the hash of everything up to their end.

    The cache owns no reference: a block nobody holds stays findable until the pool hands it out again.
    """

    def __init__(self, pool: BlockPool, hash_fn: ChainHash | None = None) -> None:
        self.pool = pool
        self._hash_fn = hash_fn or chain_hash
        self._by_hash: dict[int, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        pool.on_evict = self._forget

    def __len__(self) -> int:
        return len(self._by_hash)

    def match(self, token_ids: Sequence[int], num_tokens: int) -> list[CachedBlock]:
        """The longest cached chain over the first `num_tokens` tokens, whole blocks only."""
        size = self.pool.block_size
        chain: list[CachedBlock] = []
        parent: CachedBlock | None = None
        for start in range(0, num_tokens - size + 1, size):
            tokens = tuple(token_ids[start : start + size])
            found = self._find(parent, tokens)
            if found is None:
                break
            chain.append(found)
            parent = found
        return chain

    def publish(self, parent: CachedBlock | None, tokens: tuple[int, ...], block_id: int) -> tuple[CachedBlock, bool]:
        """Make a full block findable. Returns its chain link, and whether `block_id` is the block behind it.

        Where an equal block is known already, that one stays and is returned.
        """
        found = self._find(parent, tokens)
        if found is not None:
            return found, found.block_id == block_id
        block_hash = self._hash_fn(parent, tokens)
        stale = self._by_hash.get(block_hash)
        if stale is not None:
            # Its parent was evicted, so no match can reach it any more; or two contents share a hash: the newer stays.
            self.withdraw(stale)
        link = CachedBlock(block_id, block_hash, tokens, parent)
        self._by_hash[block_hash] = link
        self._by_block[block_id] = link
        return link, True

    def withdraw(self, link: CachedBlock) -> None:
        """Forget a block whose contents were not written after all; its block is reused first."""
        if self._by_hash.get(link.hash) is link:
            del self._by_hash[link.hash]
            del self._by_block[link.block_id]
            self.pool.retire(link.block_id)

    def _find(self, parent: CachedBlock | None, tokens: tuple[int, ...]) -> CachedBlock | None:
        found = self._by_hash.get(self._hash_fn(parent, tokens))
        # Equal links all the way up mean equal tokens all the way up: `parent` was itself compared.
        if found is not None and found.parent is parent and found.tokens == tokens:
            return found
        return None

    def _forget(self, block_id: int) -> None:
        link = self._by_block.pop(block_id, None)
        if link is not None:
            del self._by_hash[link.hash]
