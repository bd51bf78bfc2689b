"""Decides what each step computes: which sequences, how many tokens of each, which blocks are copied first."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from batchgen.engine.admission import admission_order
from batchgen.engine.block_pool import BlockPool, OutOfBlocks
from batchgen.engine.block_table import BlockCopy, BlockTable
from batchgen.engine.prefix_cache import CachedBlock, PrefixCache
from batchgen.engine.sequence import Sequence, SequenceGroup, Status
from batchgen.records import RowError


class ScheduledChunk(NamedTuple):
    """The next `num_tokens` uncomputed tokens of a sequence, from `start` on."""

    sequence: Sequence
    start: int
    num_tokens: int


@dataclass(slots=True)
class Batch:
    """One step, as data: copies first, then all chunks in one forward pass, then one draw per entry of `samples`."""

    chunks: list[ScheduledChunk] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    samples: list[tuple[int, Sequence]] = field(default_factory=list)
    """(index of the chunk whose last token's logits are used, sequence that gets the drawn token)."""
    published: list[CachedBlock] = field(default_factory=list)
    """Links that became findable in this step and must be withdrawn if it fails."""
    num_tokens: int = 0


@dataclass(slots=True)
class SchedulerMetrics:
    """What scheduling did so far."""

    num_preemptions: int = 0
    num_copies: int = 0
    num_cached_tokens: int = 0
    peak_blocks_held: int = 0


def _age(sequence: Sequence) -> tuple[int, int]:
    return (sequence.group.age, sequence.sample)


class Scheduler:
    """Continuous batching without phases: each sequence's computed tokens chase its tokens.

    Every step serves the sequences that generate first, then chunks of prompts, then admits what waits, within
    `max_batch_tokens`. A running sequence owns slots for all its tokens. When blocks run out the youngest sequence is
    preempted: it gives its blocks back and is computed anew later, with the same result.
    """

    def __init__(
        self, pool: BlockPool, *, max_batch_tokens: int, max_sequences: int, prefix_cache: PrefixCache | None = None
    ) -> None:
        if max_batch_tokens < max_sequences:
            raise ValueError(
                f"max_batch_tokens ({max_batch_tokens}) must be at least max_sequences ({max_sequences}): "
                "every running sequence gets one token per step"
            )
        self.pool = pool
        self.prefix_cache = prefix_cache
        self.max_batch_tokens = max_batch_tokens
        self.max_sequences = max_sequences
        self.metrics = SchedulerMetrics()
        self.running: list[Sequence] = []
        self._window: list[SequenceGroup] = []
        self._queue: deque[Sequence] = deque()
        self._preempted: list[Sequence] = []
        self._finished: list[SequenceGroup] = []
        self._next_age = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no blocks yet, or not any more."""
        return len(self._window) + len(self._queue) + len(self._preempted)

    @property
    def has_unfinished(self) -> bool:
        """Whether another step is needed."""
        return bool(self.running or self._preempted or self._queue or self._window)

    def add(self, group: SequenceGroup) -> None:
        """Queue a group; it is admitted in the order of `admission_order` among what waits with it."""
        slots = self.pool.num_blocks * self.pool.block_size
        if group.params.max_tokens is not None and group.num_prompt_tokens + group.max_tokens > slots:
            message = (
                f"the prompt's {group.num_prompt_tokens} tokens and max_tokens {group.max_tokens} need more than the "
                f"{slots} slots of the KV cache; raise engine.kv_cache_memory or lower sampling.max_tokens"
            )
            self._fail_group(group, RowError("kv_capacity", message))
        elif group.num_unfinished == 0:
            self._finished.append(group)
        else:
            self._window.append(group)

    def abort(self, group: SequenceGroup) -> None:
        """Drop a group between steps, whatever its state; its blocks are free again."""
        for sequence in group.sequences:
            self._release(sequence)
            sequence.status = Status.FINISHED
        self._forget_finished()
        self._window = [waiting for waiting in self._window if waiting is not group]
        self._queue = deque(sequence for sequence in self._queue if sequence.group is not group)
        self._preempted = [sequence for sequence in self._preempted if sequence.group is not group]

    def schedule(self) -> Batch:
        """Plan the next step; empty when nothing can run (see `take_finished` for groups that failed instead)."""
        batch = Batch()
        num_preemptions = self.metrics.num_preemptions
        chunked = self._schedule_generating(batch)
        for sequence in chunked:
            if sequence.status is Status.RUNNING:
                self._schedule_chunk(batch, sequence)
        self._forget_finished()
        # What was just pushed out must not be pulled in again, nor overtaken by a newcomer.
        if self.metrics.num_preemptions == num_preemptions:
            self._admit(batch)
        self.metrics.num_copies += len(batch.copies)
        self.metrics.peak_blocks_held = max(self.metrics.peak_blocks_held, self.pool.num_held)
        return batch

    def update(self, batch: Batch, token_ids: Iterable[int], logprobs: Iterable[float]) -> None:
        """Account for a step that ran: one drawn token id and its raw log-probability per entry of `batch.samples`."""
        self.pool.end_step()
        for sequence, _, num_tokens in batch.chunks:
            sequence.num_computed_tokens += num_tokens
        for (_, sequence), token_id, logprob in zip(batch.samples, token_ids, logprobs, strict=True):
            sequence.cumulative_logprob += logprob
            if sequence.append(token_id):
                self._finish(sequence)
        self._forget_finished()

    def fail_sample(self, sequence: Sequence, error: RowError) -> None:
        """End one sequence with an error: its row becomes a row error, its siblings go on."""
        sequence.group.error = sequence.group.error or error
        self._finish(sequence)

    def rollback(self, batch: Batch) -> None:
        """A step failed: nothing it would have written counts, and its sequences wait to be computed anew."""
        self.pool.end_step()
        for sequence in self.running:
            self._preempt(sequence)
        self.running.clear()
        if self.prefix_cache is not None:
            for link in batch.published:
                self.prefix_cache.withdraw(link)

    def shrink(self) -> bool:
        """Halve the budget after a step that did not fit on the device; False if it is as small as it gets."""
        if self.max_batch_tokens == 1:
            return False
        self.max_batch_tokens = max(1, self.max_batch_tokens // 2)
        self.max_sequences = min(self.max_sequences, self.max_batch_tokens)
        return True

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

    def take_finished(self) -> list[SequenceGroup]:
        """Groups that ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def describe_waiting(self, limit: int = 8) -> str:
        """For the watchdog: the first sequences that do not get on, and what they hold."""
        waiting = [*self.running, *self._preempted, *self._queue, *(g.sequences[0] for g in self._window)]
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

    # ---- running sequences

    def _schedule_generating(self, batch: Batch) -> list[Sequence]:
        """One token for every sequence that generates; returns those that still read their prompt."""
        chunked: list[Sequence] = []
        # A copy, since samples are born and victims leave on the way; victims are younger than all scheduled before.
        for sequence in self.running[:]:
            if sequence.status is not Status.RUNNING:
                continue
            if len(sequence.token_ids) - sequence.num_computed_tokens > 1:
                chunked.append(sequence)
            elif self._reserve_slot(batch, sequence):
                self._add_chunk(batch, sequence, 1)
        return chunked

    def _reserve_slot(self, batch: Batch, sequence: Sequence) -> bool:
        """A slot for the newest token, preempting the youngest until there is one; False if that was itself."""
        table = sequence.table
        assert table is not None
        if table.num_tokens == len(sequence.token_ids):
            return True  # Its prompt's last token: the slot came with the admission.
        while True:
            try:
                copy = table.append_slots(1)
            except OutOfBlocks:
                if len(self.running) == 1:
                    self._fail_alone(sequence)
                    return False
                victim = self.running.pop()
                self._preempt(victim)
                if victim is sequence:
                    return False
            else:
                if copy is not None:
                    batch.copies.append(copy)
                return True

    def _schedule_chunk(self, batch: Batch, sequence: Sequence) -> None:
        remaining = len(sequence.token_ids) - sequence.num_computed_tokens
        num_tokens = min(remaining, self.max_batch_tokens - batch.num_tokens)
        if num_tokens > 0:
            self._add_chunk(batch, sequence, num_tokens)

    def _add_chunk(self, batch: Batch, sequence: Sequence, num_tokens: int) -> None:
        start = sequence.num_computed_tokens
        end = start + num_tokens
        batch.chunks.append(ScheduledChunk(sequence, start, num_tokens))
        batch.num_tokens += num_tokens
        if self.prefix_cache is not None and end // self.pool.block_size > len(sequence.chain):
            self._publish(batch, sequence, end)
        if end == len(sequence.token_ids):
            index = len(batch.chunks) - 1
            batch.samples.append((index, sequence))
            if sequence.sample == 0 and sequence.group.has_unborn:
                self._fork_samples(batch, sequence, index)

    def _publish(self, batch: Batch, sequence: Sequence, end: int) -> None:
        """Make the blocks that this step fills findable: later admissions of the same step share them already."""
        assert self.prefix_cache is not None
        assert sequence.table is not None
        size = self.pool.block_size
        chain = sequence.chain
        for index in range(len(chain), end // size):
            tokens = tuple(sequence.token_ids[index * size : (index + 1) * size])
            parent = chain[-1] if chain else None
            link, is_new = self.prefix_cache.publish(parent, tokens, sequence.table.block_ids[index])
            chain.append(link)
            if is_new:
                batch.published.append(link)

    def _fork_samples(self, batch: Batch, root: Sequence, chunk_index: int) -> None:
        """The other samples are born from the prompt's blocks; all draw their first token from the same logits."""
        assert root.table is not None
        for sequence in root.group.sequences[1:]:
            sequence.token_ids = root.token_ids[:]
            batch.samples.append((chunk_index, sequence))
            if len(self.running) < self.max_sequences:
                sequence.table = root.table.fork()
                sequence.chain = root.chain[:]
                sequence.num_computed_tokens = len(root.token_ids)
                self._start(sequence)
            else:
                # They take their first token now and their turn later.
                sequence.status = Status.WAITING
                insort(self._preempted, sequence, key=_age)
        root.group.has_unborn = False

    # ---- admission

    def _admit(self, batch: Batch) -> None:
        while batch.num_tokens < self.max_batch_tokens and len(self.running) < self.max_sequences:
            sequence = self._next_waiting()
            if sequence is None:
                return
            has_blocks = self._take_blocks(sequence)
            if not has_blocks and self.running:
                return
            self._leave_queue(sequence)
            if has_blocks:
                self._start(sequence)
                self._schedule_chunk(batch, sequence)
            else:
                self._fail_alone(sequence)

    def _next_waiting(self) -> Sequence | None:
        if self._preempted:
            return self._preempted[0]
        if not self._queue and self._window:
            for group in admission_order(self._window, self.pool.block_size):
                self._queue.extend(s for s in group.sequences if s.status is Status.WAITING)
            self._window.clear()
        return self._queue[0] if self._queue else None

    def _leave_queue(self, sequence: Sequence) -> None:
        if self._preempted:
            self._preempted.remove(sequence)
        else:
            self._queue.remove(sequence)

    def _take_blocks(self, sequence: Sequence) -> bool:
        """Blocks for all tokens that the sequence has, cached ones first; nothing has changed when it returns False."""
        table = BlockTable(self.pool)
        num_tokens = len(sequence.token_ids)
        if self.prefix_cache is not None:
            # The last token is never served from the cache: its logits are needed to sample.
            sequence.chain = self.prefix_cache.match(sequence.token_ids, num_tokens - 1)
            table.adopt([link.block_id for link in sequence.chain])
        num_cached = table.num_tokens
        try:
            table.append_slots(num_tokens - num_cached)
        except OutOfBlocks:
            table.free()
            sequence.chain = []
            return False
        sequence.table = table
        sequence.num_computed_tokens = num_cached
        group = sequence.group
        if group.age < 0:
            group.age = self._next_age
            self._next_age += 1
            group.cached_tokens = num_cached
        self.metrics.num_cached_tokens += num_cached
        return True

    def _start(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        insort(self.running, sequence, key=_age)

    # ---- leaving

    def _preempt(self, sequence: Sequence) -> None:
        """Take the blocks away; the caller takes it out of `running`."""
        self._release(sequence)
        sequence.status = Status.WAITING
        insort(self._preempted, sequence, key=_age)
        self.metrics.num_preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        if sequence.table is not None:
            sequence.table.free()
        sequence.table = None
        sequence.chain = []
        sequence.num_computed_tokens = 0

    def _finish(self, sequence: Sequence) -> None:
        if sequence.status is Status.WAITING and sequence in self._preempted:
            self._preempted.remove(sequence)
        self._release(sequence)
        sequence.status = Status.FINISHED
        group = sequence.group
        group.num_unfinished -= 1
        if group.num_unfinished == 0:
            self._finished.append(group)

    def _forget_finished(self) -> None:
        self.running = [sequence for sequence in self.running if sequence.status is Status.RUNNING]

    def _fail_alone(self, sequence: Sequence) -> None:
        """The sequence has the whole pool and wants more."""
        message = (
            f"{len(sequence.token_ids)} tokens fill the KV cache of {self.pool.num_blocks} blocks of "
            f"{self.pool.block_size} slots; raise engine.kv_cache_memory or set sampling.max_tokens"
        )
        unborn = sequence.group.sequences[1:] if sequence.group.has_unborn else []
        sequence.group.has_unborn = False
        for failed in (sequence, *unborn):
            self.fail_sample(failed, RowError("kv_capacity", message))

    def _fail_group(self, group: SequenceGroup, error: RowError) -> None:
        group.has_unborn = False
        for sequence in group.sequences:
            self.fail_sample(sequence, error)
