"""What the host does per step beside the model: schedule, build inputs, account for the tokens.

1,024 sequences generate over a fake model, so that all time is the scheduler's and the runner's own.
    python benchmarks/host_cost.py [number of sequences]
"""

from __future__ import annotations

import sys
import time
from array import array
from typing import NamedTuple

import torch

from batchgen.engine.batch import Draw
from batchgen.engine.block_pool import BlockPool
from batchgen.engine.device import PROCESSOR
from batchgen.engine.ops import select_ops
from batchgen.engine.prefix_cache import PrefixCache
from batchgen.engine.sample_columns import SamplingColumns
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.sequence import SequenceGroup
from batchgen.engine.step_inputs import BlockTables, host_inputs
from batchgen.sampling_params import SamplingParams

NUM_STEPS = 100
BLOCK_SIZE = 16


class Cost(NamedTuple):
    """Milliseconds of one step, the median."""

    schedule: float
    inputs: float
    sample_columns: float
    update: float


def measure(num_sequences: int) -> Cost:
    """Run NUM_STEPS steps in which every sequence generates one token."""
    pool = BlockPool(num_sequences * 24, BLOCK_SIZE)
    scheduler = Scheduler(pool, max_batch_tokens=8192, max_sequences=num_sequences, prefix_cache=PrefixCache(pool))
    params = SamplingParams(temperature=0.8, seed=1, ignore_eos=True)
    for row in range(num_sequences):
        prompt = array("i", [row % 1000, *range(row % 30)])
        group = SequenceGroup(row, prompt, params, 0, row, 1, max_tokens=NUM_STEPS + 64, num_unfinished=1)
        group.sequences.append(group.new_sequence(0))
        scheduler.add(group)
    tables, columns = BlockTables(PROCESSOR), SamplingColumns(select_ops(PROCESSOR.where), PROCESSOR)
    times: list[Cost] = []
    while len(times) < NUM_STEPS:
        started = time.perf_counter()
        batch = scheduler.schedule()
        scheduled = time.perf_counter()
        host_inputs(batch, tables, BLOCK_SIZE)
        prepared = time.perf_counter()
        sequences = [sequence for _, sequence in batch.samples]
        columns.of(sequences)
        sampled = time.perf_counter()
        draws = [Draw(7, -1.0)] * len(batch.samples)
        drawn = time.perf_counter()
        scheduler.launch(batch)
        scheduler.update(batch, draws)
        ended = time.perf_counter()
        if len(batch.samples) == num_sequences and batch.num_tokens == num_sequences:
            times.append(Cost(scheduled - started, prepared - scheduled, sampled - prepared, ended - drawn))
    middle = len(times) // 2
    return Cost(*(1e3 * sorted(column)[middle] for column in zip(*times, strict=True)))


def main() -> None:
    """Print the cost for the number of sequences given."""
    torch.set_num_threads(1)
    num_sequences = int(sys.argv[1]) if len(sys.argv) > 1 else 1024
    cost = measure(num_sequences)
    for name, value in cost._asdict().items():
        print(f"{name:15} {value:6.2f} ms")
    print(f"{'in all':15} {sum(cost):6.2f} ms per step of {num_sequences} sequences")


if __name__ == "__main__":
    main()
