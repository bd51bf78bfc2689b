from __future__ import annotations

import subprocess
import sys

import pytest

from batchgen.engine.block_pool import BlockPool
from batchgen.engine.block_table import BlockTable
from batchgen.engine.prefix_cache import CachedBlock, ChainHash, PrefixCache, chain_hash

SIZE = 4


def written(cache: PrefixCache, tokens: list[int]) -> BlockTable:
    """A table over `tokens` whose full blocks are published."""
    table = BlockTable(cache.pool)
    table.append_slots(len(tokens))
    publish(cache, table, tokens)
    return table


def publish(cache: PrefixCache, table: BlockTable, tokens: list[int]) -> list[CachedBlock]:
    chain: list[CachedBlock] = []
    for index in range(len(tokens) // SIZE):
        block = tuple(tokens[index * SIZE : (index + 1) * SIZE])
        link, _ = cache.publish(chain[-1] if chain else None, block, table.block_ids[index])
        chain.append(link)
    return chain


def found(cache: PrefixCache, tokens: list[int]) -> list[int]:
    return [link.block_id for link in cache.match(tokens, len(tokens))]


def make(num_blocks: int = 16, hash_fn: ChainHash | None = None) -> PrefixCache:
    return PrefixCache(BlockPool(num_blocks, SIZE), hash_fn)


def test_the_longest_known_prefix_is_found_in_whole_blocks() -> None:
    cache = make()
    table = written(cache, list(range(10)))
    assert found(cache, list(range(10))) == list(table.block_ids[:2])
    assert found(cache, [*range(7), 99, 100]) == list(table.block_ids[:1])
    assert found(cache, [99, *range(1, 10)]) == []


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (9, 2)])
def test_only_the_first_num_tokens_are_matched(num_tokens: int, num_blocks: int) -> None:
    cache = make()
    written(cache, list(range(12)))
    assert len(cache.match(list(range(12)), num_tokens)) == num_blocks


def test_equal_blocks_after_different_prefixes_are_different_blocks() -> None:
    cache = make()
    written(cache, [1, 1, 1, 1, 5, 6, 7, 8])
    assert found(cache, [2, 2, 2, 2, 5, 6, 7, 8]) == []
    assert found(cache, [5, 6, 7, 8]) == []


@pytest.mark.parametrize(
    "hash_fn", [lambda _, __: 7, lambda parent, _: 0 if parent is None else 1], ids=["all", "level"]
)
def test_a_forced_collision_changes_nothing_but_what_is_found(hash_fn: ChainHash) -> None:
    cache = make(hash_fn=hash_fn)
    first = written(cache, list(range(8)))
    second = written(cache, list(range(100, 108)))
    for tokens, table in ((list(range(8)), first), (list(range(100, 108)), second)):
        hit = found(cache, tokens)
        assert hit == list(table.block_ids[: len(hit)]), "a hit holds the tokens asked for"
    assert found(cache, [*range(4), *range(104, 108)]) in ([], list(first.block_ids[:1]))


def test_an_equal_block_that_is_known_already_stays() -> None:
    cache = make()
    first = written(cache, list(range(4)))
    second = BlockTable(cache.pool)
    second.append_slots(4)
    link, is_new = cache.publish(None, (0, 1, 2, 3), second.block_ids[0])
    assert not is_new
    assert link.block_id == first.block_ids[0]
    again, is_new = cache.publish(None, (0, 1, 2, 3), first.block_ids[0])
    assert is_new, "its own block is behind the link"
    assert again is link


def test_a_freed_block_is_found_until_it_is_handed_out() -> None:
    cache = make(num_blocks=2)
    table = written(cache, list(range(8)))
    blocks = list(table.block_ids)
    table.free()
    assert found(cache, list(range(8))) == blocks
    cache.pool.allocate()
    assert found(cache, list(range(8))) == blocks[:1], "the chain's tail is evicted first"
    cache.pool.allocate()
    assert found(cache, list(range(8))) == []
    assert len(cache) == 0


def test_the_least_recently_used_chain_is_evicted_first() -> None:
    cache = make(num_blocks=4)
    old, new = list(range(8)), list(range(50, 58))
    tables = [written(cache, old), written(cache, new)]
    for table in tables:
        table.free()
    reader = BlockTable(cache.pool)
    reader.adopt(found(cache, old))
    reader.free()
    cache.pool.allocate()
    cache.pool.allocate()
    assert len(found(cache, old)) == 2
    assert found(cache, new) == []


def test_a_withdrawn_block_is_not_found_and_is_reused_first() -> None:
    cache = make(num_blocks=4)
    table = written(cache, list(range(8)))
    other = written(cache, list(range(50, 58)))
    chain = cache.match(list(range(8)), 8)
    other.free()
    table.free()
    for link in chain:
        cache.withdraw(link)
    assert found(cache, list(range(8))) == []
    assert {cache.pool.allocate(), cache.pool.allocate()} == {link.block_id for link in chain}
    assert len(found(cache, list(range(50, 58)))) == 2
    cache.withdraw(chain[0])  # A second time changes nothing.
    assert len(cache) == 2


def test_children_of_an_evicted_block_are_never_found_under_its_successor() -> None:
    cache = make(num_blocks=8)
    first = written(cache, list(range(8)))
    keeper = BlockTable(cache.pool)
    keeper.adopt([first.block_ids[1]])
    parent = first.block_ids[0]
    first.free()
    # Only the parent is handed out: the child is still held.
    taken = [cache.pool.allocate() for _ in range(cache.pool.num_free)]
    assert parent in taken
    assert found(cache, list(range(8))) == []
    for block in taken:
        cache.pool.free(block)
    second = BlockTable(cache.pool)
    second.append_slots(4)
    link, _ = cache.publish(None, (0, 1, 2, 3), second.block_ids[0])
    assert found(cache, list(range(8))) == [second.block_ids[0]]
    # Its place is taken by the block that continues the new parent.
    successor = cache.pool.allocate()
    child, is_new = cache.publish(link, (4, 5, 6, 7), successor)
    assert is_new
    assert child.block_id == successor
    assert found(cache, list(range(8))) == [second.block_ids[0], successor]
    keeper.free()
    assert found(cache, list(range(8))) == [second.block_ids[0], successor]


def test_the_hash_of_a_chain_is_the_same_in_every_process() -> None:
    here = chain_hash(CachedBlock(0, chain_hash(None, (1, 2)), (1, 2), None), (3, 4))
    program = (
        "from batchgen.engine.prefix_cache import CachedBlock, chain_hash\n"
        "print(chain_hash(CachedBlock(0, chain_hash(None, (1, 2)), (1, 2), None), (3, 4)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "77"}
    )
    assert int(done.stdout) == here
