"""Decides what each step computes: which sequences, how many tokens of each, which blocks are copied first."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import groupby

from batchgen.engine.admission import check_capacity
from batchgen.engine.batch import Batch, Draw
from batchgen.engine.beam import Continuation, extend_beams
from batchgen.engine.block_pool import BlockPool, OutOfBlocks
from batchgen.engine.block_table import blocks_to_append
from batchgen.engine.prefix_cache import PrefixCache
from batchgen.engine.residency import Residency
from batchgen.engine.sequence import Ending, Sequence, SequenceGroup, Status
from batchgen.engine.waiting import WaitingQueue, age
from batchgen.records import RowError

RUNNING, FINISHED = Status.RUNNING, Status.FINISHED
"""Bound once: looked up in the enumeration for each sequence they were a seventh of what a step takes here."""
NO_ALLOWED_TOKEN = RowError("no_allowed_token", "every token was banned, or the model's logits were not finite")


@dataclass(slots=True)
class SchedulerMetrics:
    """What scheduling did so far."""

    num_preemptions: int = 0
    num_copies: int = 0
    peak_blocks_held: int = 0


class Scheduler:
    """Continuous batching without phases: each sequence's computed tokens chase its tokens.

    Every step gives each running sequence a token at least, and a prompt that is being read as many as are left over,
    then admits what waits, within `max_batch_tokens`. A running sequence holds slots for what it has computed. When
    blocks run out the youngest sequence is preempted: it gives its blocks back and is computed anew later, with the
    same result.
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
        self._block_size = pool.block_size
        self._blocks = Residency(pool, prefix_cache)
        self.max_batch_tokens = max_batch_tokens
        self.max_sequences = max_sequences
        self._full_budget = (max_batch_tokens, max_sequences)
        self.metrics = SchedulerMetrics()
        self.running: list[Sequence] = []
        self._waiting = WaitingQueue(pool.block_size)
        self._finished: list[SequenceGroup] = []
        self._next_age = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no blocks yet, or not any more."""
        return len(self._waiting)

    @property
    def has_unfinished(self) -> bool:
        """Whether another step is needed."""
        return bool(self.running or self._waiting)

    def add(self, group: SequenceGroup) -> None:
        """Queue a group; it is admitted in the order of `admission_order` among what waits with it."""
        error = check_capacity(group, self.pool, self.max_sequences)
        if error is not None:
            self._fail_group(group, error)
        elif group.num_unfinished == 0:
            self._finished.append(group)
        else:
            self._waiting.add(group)

    def abort(self, groups: Collection[SequenceGroup]) -> None:
        """Drop groups between steps, whatever their state, in one pass; their blocks are free again."""
        for group in groups:
            for sequence in group.sequences:
                self._leave(sequence)
        self._forget_finished()
        self._waiting.discard(groups)
        doomed = set(groups)
        self._finished = [group for group in self._finished if group not in doomed]

    def schedule(self) -> Batch:
        """Plan the next step; empty when nothing can run (see `take_finished` for groups that failed instead)."""
        batch = Batch()
        num_preemptions = self.metrics.num_preemptions
        self._schedule_running(batch)
        self._forget_finished()
        # What was just pushed out must not be pulled in again, nor overtaken by a newcomer.
        if self.metrics.num_preemptions == num_preemptions:
            self._admit(batch)
        self.metrics.num_copies += len(batch.copies)
        self.metrics.peak_blocks_held = max(self.metrics.peak_blocks_held, self.pool.num_held)
        return batch

    def launch(self, batch: Batch) -> None:
        """The step is on its way: the next one may be planned as if it had run, before its tokens are known."""
        self.pool.end_step()
        for sequence, num_tokens in zip(batch.sequences, batch.counts, strict=True):
            sequence.num_computed_tokens += num_tokens
        for draw, (_, sequence) in enumerate(batch.samples):
            sequence.num_unseen += 1
            sequence.draw = draw

    def update(self, batch: Batch, draws: Iterable[Draw], continuations: Iterable[list[Continuation]] = ()) -> int:
        """Account for the oldest launched step: a draw per entry of `samples`, the best tokens per entry of `beams`.

        Returns how many draws count. Those of sequences that ended meanwhile do not: they were computed in vain.
        """
        for sequence in batch.ending:
            if sequence.num_computed_tokens == len(sequence.token_ids):
                sequence.ending = Ending("length")
                self._finish(sequence)
        num_taken = 0
        for (_, sequence), draw in zip(batch.samples, draws, strict=True):
            if sequence.status is FINISHED:
                continue
            num_taken += 1
            sequence.num_unseen -= 1
            if not draw.ok:
                broken = None if sequence.constraint is None else sequence.constraint.error
                self._fail_sample(sequence, broken or NO_ALLOWED_TOKEN)
                continue
            sequence.note(draw.logprob, draw.alternatives)
            if sequence.append(draw.token_id):
                self._finish(sequence)
        beams = zip(batch.beams, continuations, strict=True)
        for _, entries in groupby(beams, key=lambda entry: id(entry[0][1].group)):
            live, tokens = zip(*((sequence, tokens) for (_, sequence), tokens in entries), strict=True)
            self._advance_beams(list(live), list(tokens))
        self._forget_finished()
        return num_taken

    def fail(self, sequence: Sequence, error: RowError) -> None:
        """End a sequence with an error, and what cannot be without it: its unborn siblings, the beams of its search."""
        group = sequence.group
        if group.search is not None or group.has_unborn:
            self._waiting.discard([group])
            self._fail_group(group, error)
        else:
            self._fail_sample(sequence, error)

    def rollback(self, batch: Batch) -> None:
        """A step failed: nothing it would have written counts, and its sequences wait to be computed anew.

        Of several launched steps the newest is rolled back first.
        """
        self.pool.end_step()
        while self.running:
            self._preempt_youngest()
        self._blocks.withdraw(batch.published)
        for _, sequence in batch.samples:
            sequence.num_unseen = 0

    def shrink(self) -> bool:
        """Halve the budget after a step that did not fit on the device; False if it is as small as it gets."""
        if self.max_batch_tokens == 1:
            return False
        self.max_batch_tokens = max(1, self.max_batch_tokens // 2)
        self.max_sequences = min(self.max_sequences, self.max_batch_tokens)
        return True

    def restore(self) -> None:
        """Take back all shrinking: what did not fit is gone."""
        self.max_batch_tokens, self.max_sequences = self._full_budget

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that admissions found in the prefix cache."""
        return self._blocks.num_cached_tokens

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
        waiting = [*self.running, *self._waiting]
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

    def _schedule_running(self, batch: Batch) -> None:
        """A token for every running sequence, more for those that read a prompt or a forced run: the oldest first."""
        num_after = len(self.running)
        sequences, starts, counts, samples = batch.sequences, batch.starts, batch.counts, batch.samples
        # A copy, since samples are born and victims leave on the way; victims are younger than all scheduled before.
        for sequence in self.running[:]:
            num_after -= 1
            if sequence.status is not RUNNING:
                continue
            group = sequence.group
            table = sequence.table
            assert table is not None
            start = sequence.num_computed_tokens
            if (
                table.room > 1
                and start >= group.num_prompt_tokens
                and start + 1 == len(sequence.token_ids) + sequence.num_unseen
                and (start < group.last_token or not sequence.num_unseen)
                and group.search is None
                and not group.has_unborn
            ):
                # The common case, in line: the token drawn last, in a block that it does not fill.
                table.room -= 1
                table.num_tokens += 1
                samples.append((len(sequences), sequence))
                sequences.append(sequence)
                starts.append(start)
                counts.append(1)
                batch.num_tokens += 1
            elif group.search is None or sequence.num_generated == 0:
                self._schedule_chunk(batch, sequence, num_after)
            elif sequence is group.sequences[0]:
                self._schedule_beams(batch, group)

    def _schedule_chunk(self, batch: Batch, sequence: Sequence, num_after: int = 0) -> None:
        """As many of its tokens as the budget allows; a token is left for each of `num_after` others."""
        if sequence.num_unseen and sequence.num_generated >= sequence.group.max_tokens:
            return  # Its last token is on its way.
        num_tokens = len(sequence.token_ids) + sequence.num_unseen - sequence.num_computed_tokens
        if num_tokens > 1:
            num_tokens = min(num_tokens, self.max_batch_tokens - batch.num_tokens - num_after)
        if num_tokens > 0 and self._reserve_slots(batch, sequence, num_tokens):
            self._add_chunk(batch, sequence, num_tokens)

    def _reserve_slots(self, batch: Batch, sequence: Sequence, num_tokens: int) -> bool:
        """Slots for its next tokens, preempting the youngest until there are some; False if that was itself."""
        table = sequence.table
        assert table is not None
        while True:
            try:
                copy = table.append_slots(num_tokens)
            except OutOfBlocks:
                if self.running[0].group is sequence.group and len(self.running) == 1:
                    if sequence.num_unseen:
                        return False  # Perhaps the token on its way ends it.
                    self._fail_alone(sequence)
                else:
                    self._preempt_youngest()
                if sequence.status is not Status.RUNNING:
                    return False
            else:
                if copy is not None:
                    batch.copies.append(copy)
                return True

    def _schedule_beams(self, batch: Batch, group: SequenceGroup) -> None:
        """One token for every live beam of the group, or none: they are compared with each other after the step."""
        tables = [sequence.table for sequence in group.sequences if sequence.table is not None]
        while blocks_to_append(tables) > self.pool.num_free:
            if self.running[0].group is group and self.running[-1].group is group:
                self._fail_alone(group.sequences[0])
            else:
                self._preempt_youngest()
            if group.sequences[0].status is not Status.RUNNING or group.sequences[0].num_generated == 0:
                return
        for sequence, table in zip(group.sequences, tables, strict=True):
            copy = table.append_slots(1)
            if copy is not None:
                batch.copies.append(copy)
            self._add_chunk(batch, sequence, 1)

    def _add_chunk(self, batch: Batch, sequence: Sequence, num_tokens: int) -> None:
        group = sequence.group
        start = sequence.num_computed_tokens
        end = start + num_tokens
        index = len(batch.sequences)
        batch.add(sequence, start, num_tokens)
        if end // self._block_size > len(sequence.chain):
            # A block whose last token is not known yet is published with a later step.
            batch.published.extend(self._blocks.publish(sequence, min(end, len(sequence.token_ids))))
        if group.prompt_logprobs is not None and sequence.is_scored:
            batch.scored.append(index)
        if end == len(sequence.token_ids) + sequence.num_unseen:
            if group.max_tokens == 0:
                batch.ending.append(sequence)
                return
            if group.search is not None:
                batch.beams.append((index, sequence))
                return
            batch.samples.append((index, sequence))
            if group.has_unborn and sequence.sample == 0:
                self._fork_samples(batch, sequence, index)

    def _fork_samples(self, batch: Batch, root: Sequence, chunk_index: int) -> None:
        """The other samples are born from the prompt's blocks; all draw their first token from the same logits."""
        group = root.group
        room = self.max_sequences - self._num_places_taken()
        for index in range(1, len(group.sequences)):
            if index <= room:
                sequence = root.fork(index)
                sequence.num_computed_tokens = len(root.token_ids)
                self._start(sequence)
            else:
                # It takes its first token now and its turn later.
                sequence = group.new_sequence(index)
                self._waiting.put_back(sequence)
            group.sequences[index] = sequence
            batch.samples.append((chunk_index, sequence))
        group.has_unborn = False

    # ---- beams

    def _advance_beams(self, live: list[Sequence], continuations: list[list[Continuation]]) -> None:
        group = live[0].group
        search = group.search
        assert search is not None
        if not any(continuations):
            self._fail_group(group, NO_ALLOWED_TOKEN)
            return
        survivors = search.advance(live, continuations)
        if search.is_done:
            for sequence in live:
                self._leave(sequence)
            group.num_unfinished = 0
            self._finished.append(group)
        else:
            group.sequences = extend_beams(live, survivors)
            for sequence in live:
                if sequence not in group.sequences:
                    self._leave(sequence)
            for sequence in group.sequences:
                if sequence not in live:
                    self._start(sequence)

    # ---- admission

    def _admit(self, batch: Batch) -> None:
        room = self.max_sequences - self._num_places_taken()
        while batch.num_tokens < self.max_batch_tokens:
            sequence = self._waiting.peek()
            if sequence is None or sequence.num_unseen:
                return
            places = sequence.group.num_places
            if places > self.max_sequences:
                message = f"{places} beams at once are more than the device has memory for"
                self.fail(self._waiting.pop(), RowError("out_of_memory", message))
                continue
            if places > room:
                return
            # Each running sequence wants a block soon: without these a newcomer would be pushed out again at once.
            has_blocks = self._blocks.enter(sequence, spare=len(self.running))
            if not has_blocks and self.running:
                return
            self._waiting.pop()
            if has_blocks:
                num_running = len(self.running)
                if sequence.group.age < 0:
                    sequence.group.age = self._next_age
                    sequence.group.started = time.monotonic()
                    self._next_age += 1
                self._start(sequence)
                self._schedule_chunk(batch, sequence)
                # No room is left where a sample found none: it must not be admitted before it has its first token.
                room -= max(places, len(self.running) - num_running)
            else:
                self._fail_alone(sequence)

    def _num_places_taken(self) -> int:
        """Running sequences, and those that beam searches among them may still grow to."""
        searches = {id(s.group): s.group for s in self.running if s.group.search is not None}
        return len(self.running) + sum(group.num_places - len(group.sequences) for group in searches.values())

    def _start(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        insort(self.running, sequence, key=age)

    # ---- leaving

    def _preempt_youngest(self) -> None:
        """Take the blocks of the youngest sequence; a beam search gives all of its back and starts anew later."""
        self.metrics.num_preemptions += 1
        victim = self.running[-1]
        group = victim.group
        if group.search is None:
            self.running.pop()
            self._blocks.leave(victim)
            victim.status = Status.WAITING
            self._waiting.put_back(victim)
            return
        for sequence in group.sequences:
            self._leave(sequence)
        self._forget_finished()
        root = group.new_sequence(0)
        group.sequences = [root]
        group.search = group.search.restarted()
        self._waiting.put_back(root)

    def _leave(self, sequence: Sequence) -> None:
        self._blocks.leave(sequence)
        sequence.status = Status.FINISHED
        sequence.num_unseen = 0

    def _finish(self, sequence: Sequence) -> None:
        if sequence.status is Status.WAITING:
            self._waiting.remove(sequence)
        self._leave(sequence)
        group = sequence.group
        group.num_unfinished -= 1
        if group.num_unfinished == 0:
            self._finished.append(group)

    def _forget_finished(self) -> None:
        self.running = [sequence for sequence in self.running if sequence.status is RUNNING]

    def _fail_alone(self, sequence: Sequence) -> None:
        """The sequence, or its beam search, has the whole pool and wants more."""
        message = (
            f"{len(sequence.token_ids)} tokens fill the KV cache of {self.pool.num_blocks} blocks of "
            f"{self.pool.block_size} slots; raise engine.kv_cache_memory or set sampling.max_tokens"
        )
        self.fail(sequence, RowError("kv_capacity", message))

    def _fail_sample(self, sequence: Sequence, error: RowError) -> None:
        """Its row becomes a row error, its siblings go on."""
        sequence.group.error = sequence.group.error or error
        self._finish(sequence)

    def _fail_group(self, group: SequenceGroup, error: RowError) -> None:
        group.has_unborn = False
        group.error = group.error or error
        for sequence in group.sequences:
            self._leave(sequence)
        group.num_unfinished = 0
        self._finished.append(group)
