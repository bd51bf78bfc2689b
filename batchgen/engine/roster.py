"""Where every sequence stands: it waits, it runs and holds blocks, or it is finished."""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection

from batchgen.engine.block_pool import BlockPool
from batchgen.engine.prefix_cache import PrefixCache
from batchgen.engine.residency import Residency
from batchgen.engine.sequence import Sequence, SequenceGroup, Status
from batchgen.engine.waiting import WaitingQueue, age
from batchgen.records import RowError

RUNNING = Status.RUNNING
"""Bound once: looked up in the enumeration for each sequence it was a seventh of what a step takes in the scheduler."""


class Roster:
    """Moves sequences and groups between waiting, running and finished; what they hold goes with them."""

    def __init__(self, pool: BlockPool, prefix_cache: PrefixCache | None) -> None:
        self.pool = pool
        self.blocks = Residency(pool, prefix_cache)
        self.running: list[Sequence] = []
        """The oldest first; those that ended stay until `forget_finished`."""
        self.waiting = WaitingQueue(pool.block_size)
        self.finished: list[SequenceGroup] = []
        """Groups that ended and were not taken yet."""
        self.num_preemptions = 0

    def num_places_taken(self) -> int:
        """Running sequences, and those that beam searches among them may still grow to."""
        searches = {id(s.group): s.group for s in self.running if s.group.search is not None}
        return len(self.running) + sum(group.num_places - len(group.sequences) for group in searches.values())

    def start(self, sequence: Sequence) -> None:
        """It runs from now on; it has its blocks already."""
        sequence.status = RUNNING
        insort(self.running, sequence, key=age)

    def preempt_youngest(self) -> None:
        """Take the blocks of the youngest sequence; a beam search gives all of its back and starts anew later."""
        self.num_preemptions += 1
        victim = self.running[-1]
        group = victim.group
        if group.search is None:
            self.running.pop()
            self.blocks.leave(victim)
            victim.status = Status.WAITING
            self.waiting.put_back(victim)
            return
        for sequence in group.sequences:
            self.leave(sequence)
        self.forget_finished()
        root = group.new_sequence(0)
        group.sequences = [root]
        group.search = group.search.restarted()
        self.waiting.put_back(root)

    def leave(self, sequence: Sequence) -> None:
        """Give its blocks back for good; its group goes on."""
        self.blocks.leave(sequence)
        sequence.status = Status.FINISHED
        sequence.num_unseen = 0

    def finish(self, sequence: Sequence) -> None:
        """It has ended, and its group with the last of its sequences."""
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        self.leave(sequence)
        group = sequence.group
        group.num_unfinished -= 1
        if group.num_unfinished == 0:
            self.finished.append(group)

    def finish_group(self, group: SequenceGroup) -> None:
        """All of it has ended at once."""
        for sequence in group.sequences:
            self.leave(sequence)
        group.num_unfinished = 0
        self.finished.append(group)

    def forget_finished(self) -> None:
        """Only what runs stands in `running` afterwards."""
        self.running = [sequence for sequence in self.running if sequence.status is RUNNING]

    def abort(self, groups: Collection[SequenceGroup]) -> None:
        """Drop groups, whatever their state, in one pass; their blocks are free again."""
        for group in groups:
            for sequence in group.sequences:
                self.leave(sequence)
        self.forget_finished()
        self.waiting.discard(groups)
        doomed = set(groups)
        self.finished = [group for group in self.finished if group not in doomed]

    def take_finished(self) -> list[SequenceGroup]:
        """Groups that ended since the last call."""
        finished, self.finished = self.finished, []
        return finished

    # ---- errors

    def fail(self, sequence: Sequence, error: RowError) -> None:
        """End a sequence with an error, and what cannot be without it: its unborn siblings, the beams of its search."""
        group = sequence.group
        if group.search is not None or group.has_unborn:
            self.waiting.discard([group])
            self.fail_group(group, error)
        else:
            self.fail_sample(sequence, error)

    def fail_alone(self, sequence: Sequence) -> None:
        """The sequence, or its beam search, has the whole pool and wants more."""
        message = (
            f"{len(sequence.token_ids)} tokens fill the KV cache of {self.pool.num_blocks} blocks of "
            f"{self.pool.block_size} slots; raise engine.kv_cache_memory or set sampling.max_tokens"
        )
        self.fail(sequence, RowError("kv_capacity", message))

    def fail_sample(self, sequence: Sequence, error: RowError) -> None:
        """Its row becomes a row error, its siblings go on."""
        sequence.group.error = sequence.group.error or error
        self.finish(sequence)

    def fail_group(self, group: SequenceGroup, error: RowError) -> None:
        """Its row becomes a row error; nothing of it goes on."""
        group.has_unborn = False
        group.error = group.error or error
        self.finish_group(group)

    # ---- views

    def useful_share(self) -> float:
        """Computed tokens over slots in held blocks; a block with several owners counts once. 1.0 for an empty pool."""
        slots = self.pool.num_held * self.pool.block_size
        unused = 0
        shared_tails: set[int] = set()
        for sequence in self.running:
            block_ids = sequence.table.block_ids if sequence.table is not None else []
            tail = block_ids[-1]
            if self.pool.is_shared(tail):
                if tail in shared_tails:
                    continue
                shared_tails.add(tail)
            unused += len(block_ids) * self.pool.block_size - sequence.num_computed_tokens
        return 1.0 - unused / slots if slots else 1.0

    def describe_waiting(self, limit: int = 8) -> str:
        """For the watchdog: the first sequences that do not get on, and what they hold."""
        waiting = [*self.running, *self.waiting]
        named = ", ".join(
            f"prompt {s.group.prompt_index} sample {s.sample} ({s.status.name.lower()}, "
            f"{s.num_computed_tokens} of {len(s.token_ids)} tokens)"
            for s in waiting[:limit]
        )
        return f"{len(waiting)} sequences wait with {self.pool.num_free} of {self.pool.num_blocks} blocks free: {named}"

    def check_integrity(self) -> None:
        """Assert that the pool counts exactly the references of the running tables."""
        self.pool.check_integrity(sequence.table.block_ids for sequence in self.running if sequence.table is not None)
        assert all(sequence.table is not None for sequence in self.running), "a running sequence has no block table"
