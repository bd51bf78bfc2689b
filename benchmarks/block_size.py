"""Which block size: time and waste of the workloads for each size that the engine has.

    python -m benchmarks.block_size [plain shared parallel] [--sizes 8 16 32 64] [--scale 0.5]
        [--repeat 2] [--json benchmarks/results/block_size.json]

Sizes take turns, so that a machine that slows down does so for all of them. Waste is the share of the slots of held
blocks without a token, a shared block counted once; copies are blocks copied on write.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from batchgen import Engine, SamplingParams
from benchmarks.throughput import MODEL, _params


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=["plain", "shared", "parallel"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--scale", type=float, default=0.5, help="share of the prompts")
    parser.add_argument("--repeat", type=int, default=2, help="the fastest run counts")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures here, for docs/block-size.md")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    figures: dict[tuple[str, int], Measured] = {}
    for _ in range(options.repeat):
        for size in options.sizes:
            for name, measured in _measure(options.workloads, size, options.scale):
                seconds[name, size].append(measured.seconds)
                figures[name, size] = measured
    print(f"{torch.get_num_threads()} threads, scale {options.scale}")
    print("| workload | block size | seconds | waste | copies |\n|---|---|---|---|---|")
    for name in options.workloads:
        for size in options.sizes:
            found = figures[name, size]
            print(
                f"| {name} | {size} | {min(seconds[name, size]):.2f} | {found.waste:.1%} | {found.num_copies} |",
                flush=True,
            )
    if options.json is not None:
        rows = [
            {
                "workload": name,
                "block_size": size,
                "seconds": min(seconds[name, size]),
                "waste": figures[name, size].waste,
                "num_copies": figures[name, size].num_copies,
            }
            for name in options.workloads
            for size in options.sizes
        ]
        found = {
            "processor": processor(),
            "threads": torch.get_num_threads(),
            "scale": options.scale,
            "repeat": options.repeat,
            "rows": rows,
        }
        options.json.parent.mkdir(exist_ok=True)
        options.json.write_text(json.dumps(found, indent=2) + "\n")


def processor() -> str:
    """The name of the processor, as Linux has it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


class Measured(NamedTuple):
    """One workload with one block size."""

    seconds: float
    waste: float
    num_copies: int


def _measure(names: list[str], block_size: int, scale: float) -> Iterator[tuple[str, Measured]]:
    """The workloads one after another, on one engine: they share no prefix."""
    engine = Engine(MODEL, device="cpu", block_size=block_size, kv_cache_memory="2GiB")
    list(engine.generate([[11] * 40, [12] * 30], SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)))
    for name in names:
        workload = json.loads((Path(__file__).parent / "workloads" / f"{name}.json").read_text())
        count = max(1, round(len(workload["prompts"]) * scale))
        before = replace(engine.metrics)
        start = time.perf_counter()
        for _ in engine.generate(workload["prompts"][:count], _params(workload)[:count]):
            pass
        taken = time.perf_counter() - start
        now = engine.metrics
        useful = now.sum_useful_share - before.sum_useful_share
        waste = 1 - useful / max(1, now.num_kv_samples - before.num_kv_samples)
        yield name, Measured(taken, waste, now.num_copies - before.num_copies)


if __name__ == "__main__":
    main()
