"""The steps of beam searches: a search's live beams move together, and its best continuations take their places."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from batchgen.engine.batch import Batch
from batchgen.engine.beam import Continuation, extend_beams
from batchgen.engine.block_table import blocks_to_append
from batchgen.engine.roster import Roster
from batchgen.engine.sequence import Sequence, SequenceGroup, Status
from batchgen.records import RowError

NO_ALLOWED_TOKEN = RowError("no_allowed_token", "every token was banned, or the model's logits were not finite")


def reserve_beam_slots(roster: Roster, batch: Batch, group: SequenceGroup) -> bool:
    """A slot for the next token of every live beam of the group, preempting the youngest until there are some.

    All or none, since beams are compared with each other after the step; False if the group itself was preempted or
    failed.
    """
    tables = [sequence.table for sequence in group.sequences if sequence.table is not None]
    while blocks_to_append(tables) > roster.pool.num_free:
        if roster.running[0].group is group and roster.running[-1].group is group:
            roster.fail_alone(group.sequences[0])
        else:
            roster.preempt_youngest()
        if group.sequences[0].status is not Status.RUNNING or group.sequences[0].num_generated == 0:
            return False
    copies = (table.append_slots(1) for table in tables)
    batch.copies.extend(copy for copy in copies if copy is not None)
    return True


def advance_beams(roster: Roster, batch: Batch, continuations: Iterable[list[Continuation]]) -> None:
    """Account for a launched step: the best tokens per entry of `batch.beams`, search by search."""
    beams = zip(batch.beams, continuations, strict=True)
    for _, entries in groupby(beams, key=lambda entry: id(entry[0][1].group)):
        live, tokens = zip(*((sequence, tokens) for (_, sequence), tokens in entries), strict=True)
        _advance_search(roster, list(live), list(tokens))


def _advance_search(roster: Roster, live: list[Sequence], continuations: list[list[Continuation]]) -> None:
    group = live[0].group
    search = group.search
    assert search is not None
    if not any(continuations):
        roster.fail_group(group, NO_ALLOWED_TOKEN)
        return
    survivors = search.advance(live, continuations)
    if search.is_done:
        roster.finish_group(group)
        return
    group.sequences = extend_beams(live, survivors)
    for sequence in live:
        if sequence not in group.sequences:
            roster.leave(sequence)
    for sequence in group.sequences:
        if sequence not in live:
            roster.start(sequence)
