"""Each CPU kernel against its floor: the bytes it must move at copy bandwidth, or its products at the matrix rate.

    python -m benchmarks.kernels_cpu [--threads N] [--level LEVEL] [--repeat R] [--only NAME] [--json FILE]

Both rates are measured in the same run, and every time is the smallest of R calls over data that is not in the caches.
A share above 1 means that the data came from a cache after all. Sizes are SmolLM2-135M's.
Legend: M rows, N outputs, K inputs, S sequences.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from batchgen_kernels import cpu

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
PRODUCTS = [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)]
ROWS = [1, 8, 16, 64, 256, 512]
COLD_BYTES = 96 << 20
"""Copies of the operands are taken in turns until they amount to this, so that none is found in the second cache."""

COPIED_BYTES = 1 << 20

Call = Callable[[], object]


class Rates(NamedTuple):
    """What the machine does, per second."""

    copied_bytes: float
    """Read plus written."""
    bf16_operations: float


class Case(NamedTuple):
    """One kernel on some data; equal calls on different copies of it."""

    name: str
    calls: Sequence[Call]
    bytes_moved: int
    operations: int
    peer: Sequence[Call] = ()
    """The same by torch."""


class Result(NamedTuple):
    """One line of the table."""

    name: str
    microseconds: float
    floor_microseconds: float
    share_of_floor: float
    """Floor over time: 1 is as fast as the machine can."""
    torch_microseconds: float | None


def smallest(calls: Sequence[Call], repeat: int) -> float:
    """Seconds of the fastest of `repeat` calls, in turns over `calls`."""
    best = float("inf")
    for index in range(repeat):
        call = calls[index % len(calls)]
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
    return best


def measure_rates(repeat: int) -> Rates:
    """Copy bandwidth between buffers that no cache holds, and the faster of two packed bf16 products."""
    # Written once before, so that no page is new; parts are small, so that some escape what else the machine does.
    source, target = (torch.full((COLD_BYTES // COPIED_BYTES, COPIED_BYTES), 1, dtype=torch.uint8) for _ in range(2))
    copy = smallest([partial(to.copy_, part) for part, to in zip(source, target, strict=True)], 3 * len(source))
    x, weight = torch.randn(512, 576).bfloat16(), torch.randn(576, 576).bfloat16()
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    by_torch = partial(torch.ops.mkldnn._linear_pointwise, x, packed, None, "none", [], "")
    product = min(smallest([by_torch], repeat), smallest([partial(cpu.PackedLinear(weight), x)], repeat))
    return Rates(2 * COPIED_BYTES / copy, 2 * 512 * 576 * 576 / product)


def product_cases() -> Iterator[Case]:
    """Packed products, bf16 beside torch's, and int8."""
    for outputs, inputs in PRODUCTS:
        copies = max(1, min(24, COLD_BYTES // (outputs * inputs * 2)))
        weights = [torch.randn(outputs, inputs).bfloat16() for _ in range(copies)]
        ours = [cpu.PackedLinear(weight) for weight in weights]
        quantized = [cpu.PackedLinear(weight, int8=True) for weight in weights]
        peers = [torch.ops.mkldnn._reorder_linear_weight(weight, None) for weight in weights]
        for rows in ROWS:
            x = torch.randn(rows, inputs).bfloat16()
            by_torch = [partial(torch.ops.mkldnn._linear_pointwise, x, peer, None, "none", [], "") for peer in peers]
            moved, operations = 2 * rows * (inputs + outputs), 2 * rows * outputs * inputs
            size, name = outputs * inputs, f"{outputs} x {inputs}, {rows} rows"
            calls = [partial(linear, x) for linear in ours]
            yield Case(f"linear {name}", calls, 2 * size + moved, operations, by_torch)
            # int8 instructions do twice the work of bf16 ones.
            yield Case(f"int8 {name}", [partial(linear, x) for linear in quantized], size + moved, operations // 2)


class PagedBatch(NamedTuple):
    """Arguments of paged_attention."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor

    def attend(self) -> torch.Tensor:
        """Call the kernel."""
        return cpu.paged_attention(*self, scale=HEAD_DIM**-0.5)


def paged_batch(num_sequences: int, context: int, queries: int, shared: int = 0) -> PagedBatch:
    """Sequences of equal lengths over shuffled blocks; the first `shared` tokens lie in the same blocks."""
    per_sequence = -(-context // BLOCK_SIZE)
    tables = torch.randperm(num_sequences * per_sequence).view(num_sequences, per_sequence).int()
    tables[:, : shared // BLOCK_SIZE] = tables[0, : shared // BLOCK_SIZE]
    shape = (tables.numel(), KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    caches = [cpu.empty_in_huge_pages(shape, torch.bfloat16).normal_() for _ in range(2)]
    q = torch.randn(num_sequences * queries, HEADS, HEAD_DIM).bfloat16()
    starts = torch.arange(num_sequences + 1).int() * queries
    return PagedBatch(q, caches[0], caches[1], tables, starts, torch.full((num_sequences,), context).int())


def attention_cases() -> Iterator[Case]:
    """Decodes, decodes over a shared prefix, and prompt chunks."""
    token_bytes = KV_HEADS * HEAD_DIM * 2 * 2
    pair_operations = HEADS * HEAD_DIM * 4
    for sequences, context in ((8, 512), (64, 512), (4, 2048)):
        tokens = sequences * context
        copies = max(2, COLD_BYTES // (tokens * token_bytes))
        calls = [paged_batch(sequences, context, 1).attend for _ in range(copies)]
        yield Case(f"decode {sequences} x {context}", calls, tokens * token_bytes, tokens * pair_operations)
    sequences, prefix, own = 64, 512, 64
    shared = [paged_batch(sequences, prefix + own, 1, prefix).attend for _ in range(8)]
    read = (prefix + sequences * own) * token_bytes
    yield Case("decode 64 x (512 shared + 64)", shared, read, sequences * (prefix + own) * pair_operations)
    for queries, context in ((64, 512), (512, 512)):
        seen = queries * (context - queries) + queries * (queries + 1) // 2
        calls = [paged_batch(1, context, queries).attend for _ in range(8)]
        yield Case(f"chunk of {queries} at {context}", calls, context * token_bytes, seen * pair_operations)


def small_cases(rows: int = 256) -> Iterator[Case]:
    """Row-wise kernels and the cache's, on one step of `rows` tokens."""
    count = 40
    hidden = [torch.randn(rows, 576).bfloat16() for _ in range(count)]
    weight = torch.ones(576).bfloat16()
    row_bytes = rows * 576 * 2
    norms = [partial(cpu.rms_norm, x, weight, 1e-5, x) for x in hidden]
    yield Case(f"rms_norm with residual, {rows} rows", norms, 3 * row_bytes, 0)
    gates = [torch.randn(rows, 3072).bfloat16() for _ in range(count)]
    yield Case(f"silu_mul, {rows} rows", [partial(cpu.silu_mul, gate) for gate in gates], rows * 3 * 1536 * 2, 0)
    merged = [torch.randn(rows, HEADS + 2 * KV_HEADS, HEAD_DIM).bfloat16() for _ in range(count)]
    angles = torch.randn(rows, HEAD_DIM).bfloat16()
    turns = [partial(cpu.rotary, x[:, :HEADS], x[:, HEADS : HEADS + KV_HEADS], angles, angles) for x in merged]
    yield Case(f"rotary, {rows} rows", turns, 2 * rows * (HEADS + KV_HEADS) * HEAD_DIM * 2, 0)
    batch, slots = paged_batch(rows, BLOCK_SIZE, 1), torch.randperm(rows * BLOCK_SIZE)[:rows]
    stores = [
        partial(cpu.store_kv, x[:, HEADS:-KV_HEADS], x[:, -KV_HEADS:], batch.k_cache, batch.v_cache, slots)
        for x in merged
    ]
    yield Case(f"store_kv, {rows} rows", stores, 2 * rows * 2 * KV_HEADS * HEAD_DIM * 2, 0)


def measure(case: Case, rates: Rates, repeat: int) -> Result:
    """Time a case, and torch's way in turns with it where there is one."""
    rounds = max(repeat, len(case.calls))
    seconds = smallest(case.calls, rounds)
    peer = smallest(case.peer, rounds) if case.peer else None
    floor = max(case.bytes_moved / rates.copied_bytes, case.operations / rates.bf16_operations)
    return Result(case.name, seconds * 1e6, floor * 1e6, floor / seconds, None if peer is None else peer * 1e6)


def main() -> None:
    """Print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--level", help="an instruction-set level below the highest; see batchgen_kernels.cpu.levels()")
    parser.add_argument("--repeat", type=int, default=50, help="calls per figure (default: 50)")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    arguments = parser.parse_args()
    cpu.set_num_threads(arguments.threads)
    if arguments.level:
        cpu.set_level(arguments.level)
    torch.manual_seed(0)
    rates = measure_rates(arguments.repeat)
    print(f"{cpu.features()}: copy {rates.copied_bytes / 1e9:.1f} GB/s, bf16 {rates.bf16_operations / 1e9:.0f} GFLOP/s")
    print(f"{'kernel':40} {'us':>10} {'floor':>10} {'share':>6} {'torch':>10}")
    results = []
    for make in (small_cases, attention_cases, product_cases):
        for case in make():
            if arguments.only not in case.name:
                continue
            results.append(result := measure(case, rates, arguments.repeat))
            peer = "" if result.torch_microseconds is None else f"{result.torch_microseconds:.1f}"
            print(
                f"{result.name:40} {result.microseconds:10.1f} {result.floor_microseconds:10.1f} "
                f"{result.share_of_floor:6.2f} {peer:>10}"
            )
    if arguments.json:
        report: dict[str, object] = {"features": cpu.features()._asdict(), "torch": torch.__version__}
        report |= {"rates": rates._asdict(), "results": [result._asdict() for result in results]}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
