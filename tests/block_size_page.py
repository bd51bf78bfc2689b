"""docs/block-size.md: which block size, and what is recommended for which machine, from what `plan` takes too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from batchgen_kernels.segments import SEGMENT_TOKENS

from batchgen.config import EngineConfig
from batchgen.engine.device import GPU_RESERVE
from batchgen.engine.loading import CPU_MAX_BATCH_TOKENS, CPU_MAX_SEQUENCES, GPU_MAX_BATCH_TOKENS, GPU_MAX_SEQUENCES
from batchgen.pipeline.machine_class import CLASSES

MEASURED = Path(__file__).parent.parent / "benchmarks/results/block_size.json"
"""What `python -m benchmarks.block_size --json` wrote; the page says so where it was never run."""

_WEIGHTS = 8_030_000_000 * 2
_BYTES_PER_TOKEN = 2 * 32 * 8 * 128 * 2
"""Keys and values of 32 layers with 8 heads of 128, in bf16."""
_SEQUENCE = 1000
_GPUS = (24, 80, 141)


def block_size_page(notice: str) -> str:
    """The page."""
    return "\n".join(
        [
            "# Which block size\n",
            notice,
            *_block_sizes(),
            *_machines(),
            "| machine | `engine.block_size` | `engine.max_sequences` up to | `run.workers` | why |",
            "|---|---|---|---|---|",
            *(f"| {c.name} | {c.block_size} | {c.most_sequences:,} | {c.workers} | {c.reason} |" for c in CLASSES),
            "",
            f"Left at `auto`, an engine on a processor runs at most {CPU_MAX_SEQUENCES:,} sequences and "
            f"{CPU_MAX_BATCH_TOKENS:,} tokens a step, one on a GPU {GPU_MAX_SEQUENCES:,} and\n"
            f"{GPU_MAX_BATCH_TOKENS:,}. The rows for GPUs follow from the code alone: nothing was measured on one.\n",
            "What the sizes of GPUs come to is arithmetic: for a model of 8 billion parameters in bf16 (16 GB; 32 "
            "layers, 8 KV heads of\n128, so 128 KiB a token), before what a step itself takes:\n",
            "| memory | KV cache | tokens | sequences of 1,000 tokens |",
            "|---|---|---|---|",
            *map(_room, _GPUS),
            "",
        ]
    )


def _block_sizes() -> Iterator[str]:
    sizes = ", ".join(map(str, get_args(EngineConfig.model_fields["block_size"].annotation)))
    yield """\
Leave `engine.block_size` at 16. It cannot change a token, only time and memory. This page says what it changes, and
what else to set for which machine.

## What a larger block costs

A sequence holds whole blocks, and the last one is half empty on average: with blocks of b tokens and sequences of L
tokens about b / 2 of L + b / 2 slots hold nothing. For L = 200 that is 4 % with blocks of 16, and 14 % with 64. Only
whole blocks are shared, so of a common prefix up to b - 1 tokens are computed and stored again for each row. A
copy-on-write copies one block, so samples and beams copy more.

## What a smaller block costs

Block tables grow: one number for each block of each sequence, made on the host in each step. On a processor with bf16
instructions the attention kernel reads keys where they lie, 16 tokens at a time, if the block is a multiple of 16
(and the size of a head a multiple of 32); with blocks of 8 and less it gathers them first.

## Measured on a processor
"""
    yield from _measured()
    yield f"""
One run, on two cores of a virtual machine whose memory is slower at some times than at others. In a second run, 16
beside 64, `plain` took 7.2 s with 16 and 8.4 s with 64, `shared` 4.9 and 4.6 s, `parallel` 4.1 and 3.9 s: the waste is
certain, the gain is not.

Possible sizes are {sizes}: attention works in segments of {SEGMENT_TOKENS} tokens, which is what makes a row's bytes
independent of its batch, and a block must divide a segment. So 128 and 256 cannot be measured.
"""


def _machines() -> Iterator[str]:
    yield """\
## Why a GPU differs from a processor

This follows from how the kernels read; **nothing here was measured on a GPU.** A processor's kernel works on one
sequence after another on each core, and a block is the stretch of memory that it reads without looking up another
place: 16 tokens of a head of 64 in bf16 are 2 KiB. A GPU's kernel looks up the place of each key by itself, many at
once, and 16 tokens of a head of 128 are 4 KiB, many times what one access fetches: a larger block gains it little.
What grows with smaller blocks there is the table, which the host makes and sends in each step.

## NUMA

On a server with several NUMA nodes one engine over all cores reads weights and cache across nodes. `run.workers:
auto` starts one worker for each node, pinned to its cores; each has its own copy of the weights and its own cache.
The pinning is tested on one node; the gain was not measured.

## For which machine

`batchgen plan` finds out which of these a machine is, and takes what it recommends from this table. `max_sequences`
and `kv_cache_memory` it works out from its measurement of the model: it doubles the sequences, up to the number here
and to those of the rows that are left, as long as that gives at least 5 % more tokens a second, and sizes the cache
to hold them.
"""


def _measured() -> Iterator[str]:
    command = "python -m benchmarks.block_size plain --json benchmarks/results/block_size.json"
    if not MEASURED.exists():
        yield f"Not measured yet; `{command}` does it."
        return
    found: dict[str, Any] = json.loads(MEASURED.read_text())
    yield (
        f"`{command}`, on {found['processor']}, {found['threads']} threads, {found['scale']:.0%} of the prompts, the "
        f"fastest of {found['repeat']} runs that take turns:\n"
    )
    yield "| workload | block size | seconds | empty slots of held blocks | blocks copied |"
    yield "|---|---|---|---|---|"
    for row in found["rows"]:
        yield (
            f"| {row['workload']} | {row['block_size']} | {row['seconds']:.1f} | {row['waste']:.1%} | "
            f"{row['num_copies']:,} |"
        )


def _room(gigabytes: int) -> str:
    cache = gigabytes * 1e9 * (1 - GPU_RESERVE) - _WEIGHTS
    tokens = cache / _BYTES_PER_TOKEN
    return f"| {gigabytes} GB | {cache / 1e9:.0f} GB | {tokens:,.0f} | {tokens // _SEQUENCE:,.0f} |"
