"""Decides what each step computes: which sequences, how many tokens of each, which blocks are copied first."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

from batchgen.engine.admission import check_capacity
from batchgen.engine.batch import Batch, Draw
from batchgen.engine.beam import Continuation
from batchgen.engine.beam_scheduling import NO_ALLOWED_TOKEN, advance_beams, reserve_beam_slots
from batchgen.engine.block_pool import BlockPool, OutOfBlocks
from batchgen.engine.prefix_cache import PrefixCache
from batchgen.engine.roster import RUNNING, Roster
from batchgen.engine.sequence import Ending, Sequence, SequenceGroup, Status
from batchgen.records import RowError

FINISHED = Status.FINISHED
"""Bound once, as RUNNING is."""


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
        self._roster = Roster(pool, prefix_cache)
        self.max_batch_tokens = max_batch_tokens
        self.max_sequences = max_sequences
        self._full_budget = (max_batch_tokens, max_sequences)
        self.num_copies = self.peak_blocks_held = 0
        self._next_age = 0

    @property
    def running(self) -> list[Sequence]:
        """Sequences that hold blocks, the oldest first."""
        return self._roster.running

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no blocks yet, or not any more."""
        return len(self._roster.waiting)

    @property
    def has_unfinished(self) -> bool:
        """Whether another step is needed."""
        return bool(self.running or self._roster.waiting)

    def add(self, group: SequenceGroup) -> None:
        """Queue a group; it is admitted in the order of `admission_order` among what waits with it."""
        error = check_capacity(group, self.pool, self.max_sequences)
        if error is not None:
            self._roster.fail_group(group, error)
        elif group.num_unfinished == 0:
            self._roster.finished.append(group)
        else:
            self._roster.waiting.add(group)

    def abort(self, groups: Collection[SequenceGroup]) -> None:
        """Drop groups between steps, whatever their state, in one pass; their blocks are free again."""
        self._roster.abort(groups)

    def schedule(self) -> Batch:
        """Plan the next step; empty when nothing can run (see `take_finished` for groups that failed instead)."""
        batch = Batch()
        num_preemptions = self._roster.num_preemptions
        self._schedule_running(batch)
        self._roster.forget_finished()
        # What was just pushed out must not be pulled in again, nor overtaken by a newcomer.
        if self._roster.num_preemptions == num_preemptions:
            self._admit(batch)
        self.num_copies += len(batch.copies)
        self.peak_blocks_held = max(self.peak_blocks_held, self.pool.num_held)
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
                self._roster.finish(sequence)
        num_taken = 0
        for (_, sequence), draw in zip(batch.samples, draws, strict=True):
            if sequence.status is FINISHED:
                continue
            num_taken += 1
            sequence.num_unseen -= 1
            if not draw.ok:
                broken = None if sequence.constraint is None else sequence.constraint.error
                self._roster.fail_sample(sequence, broken or NO_ALLOWED_TOKEN)
                continue
            sequence.note(draw.logprob, draw.alternatives)
            if sequence.append(draw.token_id):
                self._roster.finish(sequence)
        advance_beams(self._roster, batch, continuations)
        self._roster.forget_finished()
        return num_taken

    def fail(self, sequence: Sequence, error: RowError) -> None:
        """End a sequence with an error, and what cannot be without it: its unborn siblings, the beams of its search."""
        self._roster.fail(sequence, error)

    def rollback(self, batch: Batch) -> None:
        """A step failed: nothing it would have written counts, and its sequences wait to be computed anew.

        Of several launched steps the newest is rolled back first.
        """
        self.pool.end_step()
        while self.running:
            self._roster.preempt_youngest()
        self._roster.blocks.withdraw(batch.published)
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
    def num_preemptions(self) -> int:
        """How often a sequence or a beam search lost its blocks."""
        return self._roster.num_preemptions

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that admissions found in the prefix cache."""
        return self._roster.blocks.num_cached_tokens

    def useful_share(self) -> float:
        """Computed tokens over slots in held blocks; a block with several owners counts once. 1.0 for an empty pool."""
        return self._roster.useful_share()

    def take_finished(self) -> list[SequenceGroup]:
        """Groups that ended since the last call."""
        return self._roster.take_finished()

    def describe_waiting(self, limit: int = 8) -> str:
        """For the watchdog: the first sequences that do not get on, and what they hold."""
        return self._roster.describe_waiting(limit)

    def check_integrity(self) -> None:
        """Assert that the pool counts exactly the references of the running tables."""
        self._roster.check_integrity()

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
            elif sequence is group.sequences[0] and reserve_beam_slots(self._roster, batch, group):
                for beam in group.sequences:
                    self._add_chunk(batch, beam, 1)

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
                    self._roster.fail_alone(sequence)
                else:
                    self._roster.preempt_youngest()
                if sequence.status is not Status.RUNNING:
                    return False
            else:
                if copy is not None:
                    batch.copies.append(copy)
                return True

    def _add_chunk(self, batch: Batch, sequence: Sequence, num_tokens: int) -> None:
        group = sequence.group
        start = sequence.num_computed_tokens
        end = start + num_tokens
        index = len(batch.sequences)
        batch.add(sequence, start, num_tokens)
        if end // self._block_size > len(sequence.chain):
            # A block whose last token is not known yet is published with a later step.
            batch.published.extend(self._roster.blocks.publish(sequence, min(end, len(sequence.token_ids))))
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
        room = self.max_sequences - self._roster.num_places_taken()
        for index in range(1, len(group.sequences)):
            if index <= room:
                sequence = root.fork(index)
                sequence.num_computed_tokens = len(root.token_ids)
                self._roster.start(sequence)
            else:
                # It takes its first token now and its turn later.
                sequence = group.new_sequence(index)
                self._roster.waiting.put_back(sequence)
            group.sequences[index] = sequence
            batch.samples.append((chunk_index, sequence))
        group.has_unborn = False

    # ---- admission

    def _admit(self, batch: Batch) -> None:
        room = self.max_sequences - self._roster.num_places_taken()
        while batch.num_tokens < self.max_batch_tokens:
            sequence = self._roster.waiting.peek()
            if sequence is None or sequence.num_unseen:
                return
            places = sequence.group.num_places
            if places > self.max_sequences:
                message = f"{places} beams at once are more than the device has memory for"
                self.fail(self._roster.waiting.pop(), RowError("out_of_memory", message))
                continue
            if places > room:
                return
            # Each running sequence wants a block soon: without these a newcomer would be pushed out again at once.
            has_blocks = self._roster.blocks.enter(sequence, spare=len(self.running))
            if not has_blocks and self.running:
                return
            self._roster.waiting.pop()
            if has_blocks:
                num_running = len(self.running)
                if sequence.group.age < 0:
                    sequence.group.age = self._next_age
                    sequence.group.started = time.monotonic()
                    self._next_age += 1
                self._roster.start(sequence)
                self._schedule_chunk(batch, sequence)
                # No room is left where a sample found none: it must not be admitted before it has its first token.
                room -= max(places, len(self.running) - num_running)
            else:
                self._roster.fail_alone(sequence)
