"""Batches of made-up texts, to try a model before any prompt is there."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from batchgen.engine.batch import Batch
from batchgen.engine.block_pool import BlockPool
from batchgen.engine.block_table import BlockTable
from batchgen.engine.sequence import SequenceGroup
from batchgen.sampling_params import SamplingParams


def made_up_batch(
    lengths: Sequence[int], vocab_size: int, pools: Sequence[BlockPool], params: SamplingParams | None = None
) -> Batch:
    """Whole texts of these lengths, each in blocks of the pool beside its length, the last token of each sampled."""
    batch = Batch()
    for index, (length, pool) in enumerate(zip(lengths, pools, strict=True)):
        token_ids = array("i", ((index * 7919 + position * 31 + 11) % vocab_size for position in range(length)))
        group = SequenceGroup(index, token_ids, params or SamplingParams(), source=0, row=index, seed=0, max_tokens=1)
        sequence = group.new_sequence(0)
        sequence.table = BlockTable(pool)
        sequence.table.append_slots(length)
        batch.add(sequence, 0, length)
        batch.samples.append((index, sequence))
    return batch


def largest_batch(num_tokens: int, num_sequences: int, vocab_size: int, block_size: int) -> Batch:
    """A step with every token and every sequence that the scheduler may give it; all texts lie in the same blocks.

    What it computes is nonsense, but it takes as much memory as a step can, and few blocks.
    """
    each, more = divmod(num_tokens, num_sequences)
    lengths = [each + (index < more) for index in range(num_sequences)]
    pools = [BlockPool(-(-length // block_size), block_size) for length in lengths]
    return made_up_batch(lengths, vocab_size, pools, SamplingParams(top_p=0.9, seed=0))
