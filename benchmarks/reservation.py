"""What paging brings: the same engine at equal KV memory, with and without contiguous reservation.

    python -m benchmarks.reservation [--scale 0.5] [--json FILE]

Before PagedAttention an engine reserved, for each request, one contiguous stretch of memory for the longest text that
the request might become. Here that is a mode of the benchmark: memory for R reservations of 2,048 tokens runs at most R
sequences at once, and shares no prefix; paged, the same memory runs whatever fits. Lengths and ids as in the workload
`plain`. `useful` is the share of that memory that holds tokens, averaged over the steps.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from batchgen import Engine, SamplingParams
from batchgen.engine.batch import Batch
from benchmarks.throughput import MODEL

RESERVED_TOKENS = 2048
RESERVATIONS = (1, 2, 4, 8, 16)
BLOCK_SIZE = 16


class UsefulShare:
    """Stands between engine and runner; averages the share of the memory that holds tokens."""

    def __init__(self, engine: Engine, slots: int) -> None:
        self._runner: Any = engine._runner
        self._slots = slots
        self.shares: list[float] = []
        engine._runner = self

    def execute(self, batch: Batch) -> torch.Tensor:
        """Run the batch; count what the cache holds after it."""
        tokens = sum(chunk.start + chunk.num_tokens for chunk in batch.chunks)
        self.shares.append(tokens / self._slots)
        logits: torch.Tensor = self._runner.execute(batch)
        return logits


def main() -> None:
    """Print the curve, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the prompts")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    workload = json.loads((Path(__file__).parent / "workloads" / "plain.json").read_text())
    count = max(1, round(len(workload["prompts"]) * options.scale))
    results = [measure(workload, count, number) for number in RESERVATIONS]
    print(f"{'reservations':>12} {'reserved s':>11} {'paged s':>9} {'ratio':>7} {'useful':>8} {'paged useful':>13}")
    for result in results:
        print(
            f"{result['reservations']:12} {result['reserved_s']:11.2f} {result['paged_s']:9.2f} {result['ratio']:7.2f} "
            f"{result['reserved_useful']:8.1%} {result['paged_useful']:13.1%}"
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def measure(workload: dict[str, Any], count: int, reservations: int) -> dict[str, Any]:
    """Both ways at the memory of so many reservations."""
    reserved_s, reserved_useful = _run(workload, count, reservations, max_sequences=reservations, prefix_caching=False)
    paged_s, paged_useful = _run(workload, count, reservations)
    return {
        "reservations": reservations,
        "prompts": count,
        "reserved_s": reserved_s,
        "paged_s": paged_s,
        "ratio": reserved_s / paged_s,
        "reserved_useful": reserved_useful,
        "paged_useful": paged_useful,
    }


def _run(workload: dict[str, Any], count: int, reservations: int, **options: Any) -> tuple[float, float]:
    slots = reservations * RESERVED_TOKENS
    engine = Engine(MODEL, dtype="bfloat16", device="cpu", kv_cache_memory=_bytes(slots), **options)
    list(engine.generate([[11] * 40], SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)))
    useful = UsefulShare(engine, slots)
    params = [
        SamplingParams(max_tokens=length, ignore_eos=True, temperature=0) for length in workload["max_new"][:count]
    ]
    start = time.perf_counter()
    done = sum(1 for _ in engine.generate(workload["prompts"][:count], params))
    seconds = time.perf_counter() - start
    assert done == count
    return seconds, sum(useful.shares) / len(useful.shares)


def _bytes(slots: int) -> int:
    """Memory of so many tokens: keys and values of 30 layers with 3 heads of 64 numbers in two bytes."""
    return slots * 30 * 2 * 3 * 64 * 2


if __name__ == "__main__":
    main()
