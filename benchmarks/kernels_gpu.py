"""Time each Triton kernel on a GPU against what the device can do: `python -m benchmarks.kernels_gpu`.

A row says how many bytes a kernel must move and how many operations it must do, the floor that follows from the copy
bandwidth and the matrix rate measured in the same run, and the share of the floor in the time taken. Median times of
CUDA graphs of many launches, so that the host is left out; inputs are larger than the device's cache.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from batchgen_kernels.attention_plan import plan_attention, tile_shape
from batchgen_kernels.copy_blocks import copy_blocks
from batchgen_kernels.paged_attention import paged_attention
from batchgen_kernels.rms_norm import rms_norm
from batchgen_kernels.rotary import rotary
from batchgen_kernels.sample import SampleParams, sample
from batchgen_kernels.segments import SharedPrefixes
from batchgen_kernels.silu_mul import silu_mul
from batchgen_kernels.store_kv import QUANTIZED_MAX, store_kv
from batchgen_kernels.top_tokens import token_ranks, top_tokens
from torch import Tensor

from benchmarks.gpu_sizes import FULL, Sizes
from benchmarks.kernel_cases import BLOCK_SIZE, ModelShape


class Rates(NamedTuple):
    """What the device can do."""

    copy: float
    """Bytes read and written per second by a large copy."""
    matrix: float
    """Operations per second of a large bf16 matrix product."""


class GpuCase(NamedTuple):
    """One kernel at one shape."""

    kernel: str
    shape: str
    run: Callable[[], Any]
    num_bytes: int
    num_operations: int


class Batch(NamedTuple):
    """Sequences by context and number of queries; the first `shared` tokens of all lie in the same blocks."""

    contexts: list[int]
    queries: list[int]
    shared: int = 0

    @property
    def num_blocks(self) -> int:
        """Blocks of all sequences, those of the shared prefix once."""
        shared = self.shared // BLOCK_SIZE
        return shared + sum(-(-length // BLOCK_SIZE) - shared for length in self.contexts)

    def tables(self, device: torch.device) -> Tensor:
        """Block tables [S, B] in shuffled order."""
        order = torch.randperm(self.num_blocks).int()
        shared = self.shared // BLOCK_SIZE
        tables = torch.zeros(len(self.contexts), -(-max(self.contexts) // BLOCK_SIZE), dtype=torch.int32)
        used = shared
        for table, length in zip(tables, self.contexts, strict=True):
            own = -(-length // BLOCK_SIZE) - shared
            table[:shared] = order[:shared]
            table[shared : shared + own] = order[used : used + own]
            used += own
        return tables.to(device)

    def prefixes(self) -> SharedPrefixes | None:
        """All sequences as one group, or None where nothing is shared."""
        if not self.shared:
            return None
        members = torch.arange(len(self.contexts), dtype=torch.int32)
        return SharedPrefixes(torch.tensor([0, len(members)]), members, torch.tensor([self.shared]))


def measure_rates(device: torch.device, sizes: Sizes) -> Rates:
    """Measure the bandwidth of a copy and the rate of a square bf16 matrix product."""
    source = torch.empty(sizes.copied_bytes, dtype=torch.int8, device=device)
    into = torch.empty_like(source)
    side = sizes.matrix_side
    a = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    copying, multiplying = seconds(lambda: into.copy_(source), device), seconds(lambda: a @ a, device)
    return Rates(2 * source.nbytes / copying, 2 * side**3 / multiplying)


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Median time of one run, from CUDA graphs of many; on a processor, of a dry run, from a single one."""
    if device.type == "cuda":
        return float(triton.testing.do_bench_cudagraph(run, rep=40, return_mode="median")) / 1000
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _elements(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def elementwise_cases(model: ModelShape, tokens: int, device: torch.device) -> Iterator[GpuCase]:
    """The kernels of one pass over the tokens' features."""
    new = partial(torch.randn, device=device, dtype=torch.bfloat16)
    x, residual, weight = new(tokens, model.features), new(tokens, model.features), new(model.features)
    shape = f"{model.name}, {tokens} tokens"
    yield GpuCase("rms_norm", shape, lambda: rms_norm(x, weight, 1e-5, residual), 4 * x.nbytes, 0)
    gate_up = new(tokens, 2 * model.inner)
    yield GpuCase("silu_mul", shape, lambda: silu_mul(gate_up), gate_up.nbytes * 3 // 2, 0)
    q, k = new(tokens, model.heads, model.k_dim), new(tokens, model.kv_heads, model.k_dim)
    angles = new(tokens, model.k_dim)
    yield GpuCase("rotary", shape, lambda: rotary(q, k, angles, angles), 2 * _elements(q, k, angles), 0)
    v = new(tokens, model.kv_heads, model.v_dim)
    blocks = tokens // BLOCK_SIZE + 1
    caches = [new(blocks, model.kv_heads, BLOCK_SIZE, dim) for dim in (model.k_dim, model.v_dim)]
    slots = torch.randperm(blocks * BLOCK_SIZE, device=device)[:tokens]
    yield GpuCase("store_kv", shape, lambda: store_kv(k, v, caches[0], caches[1], slots), 2 * _elements(k, v), 0)
    half = blocks // 2
    pairs = torch.stack((torch.randperm(half), half + torch.randperm(half)), dim=1).to(device)
    copied = 2 * half * _elements(caches[0][0], caches[1][0])
    yield GpuCase("copy_blocks", f"{model.name}, {half} blocks", lambda: copy_blocks(caches, pairs), copied, 0)


def attention_case(
    model: ModelShape,
    batch: Batch,
    device: torch.device,
    *,
    cache_dtype: torch.dtype = torch.bfloat16,
    share: bool = True,
) -> GpuCase:
    """Attention of one layer; with `share` False the shared prefix is read for every sequence."""
    heads, kv_heads = model.heads, model.kv_heads
    shape = (batch.num_blocks, kv_heads, BLOCK_SIZE)
    random = partial(torch.randn, device=device, dtype=torch.bfloat16)
    caches = [random(*shape, dim).to(cache_dtype) for dim in (model.k_dim, model.v_dim)]
    scales = torch.ones(shape, device=device) if cache_dtype in QUANTIZED_MAX else None
    prefixes = batch.prefixes() if share else None
    starts = torch.tensor([0, *batch.queries]).cumsum(0).int()
    tiles = tile_shape(heads, kv_heads, max(model.k_dim, model.v_dim))
    plan = plan_attention(starts, batch.contexts, tiles, prefixes=prefixes, device=device)
    q = random(int(starts[-1]), heads, model.k_dim)
    out = random(len(q), heads, model.v_dim)
    arguments = (q, *caches, batch.tables(device), starts.to(device), torch.tensor(batch.contexts).int().to(device))
    once = batch.shared if share else 0
    read = once + sum(length - once for length in batch.contexts)
    per_token = kv_heads * ((model.k_dim + model.v_dim) * cache_dtype.itemsize + (8 if scales is not None else 0))
    pairs = sum(
        count * length - count * (count - 1) // 2 for count, length in zip(batch.queries, batch.contexts, strict=True)
    )
    name = "prefill" if max(batch.queries) > 1 else "decode"
    label = f"{len(batch.contexts)} x {max(batch.contexts)}" + (f", {batch.shared} shared" if batch.shared else "")
    return GpuCase(
        f"paged_attention {name}" + (", prefix once" if prefixes else ""),
        f"{model.name}, {label}, {str(cache_dtype).removeprefix('torch.')}",
        lambda: paged_attention(
            *arguments, scale=model.k_dim**-0.5, k_scales=scales, v_scales=scales, prefixes=prefixes, plan=plan, out=out
        ),
        read * per_token + _elements(q, out),
        2 * pairs * heads * (model.k_dim + model.v_dim),
    )


def attention_cases(sizes: Sizes, device: torch.device) -> Iterator[GpuCase]:
    """Decodes of many and of few sequences, prompt chunks, quantized caches, and a long shared prefix both ways."""
    model = sizes.model
    many = Batch([sizes.decode_context] * sizes.num_rows, [1] * sizes.num_rows)
    yield attention_case(model, many, device)
    yield attention_case(model, many, device, cache_dtype=torch.int8)
    if device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9):
        yield attention_case(model, many, device, cache_dtype=torch.float8_e4m3fn)
    yield attention_case(model, Batch([sizes.few_context] * 4, [1] * 4), device)
    yield attention_case(model, Batch([sizes.prompt] * 4, [sizes.prompt] * 4), device)
    shared = Batch([sizes.shared_prefix + 64] * sizes.num_sharing, [1] * sizes.num_sharing, sizes.shared_prefix)
    yield attention_case(model, shared, device, share=False)
    yield attention_case(model, shared, device)


def sample_cases(model: ModelShape, rows: int, device: torch.device) -> Iterator[GpuCase]:
    """One draw per row, and its place among the others; the floor is one pass over the logits."""
    logits = torch.randn(rows, model.vocabulary, device=device) * 3
    keys = torch.zeros(rows, 5, dtype=torch.int64, device=device)
    keys[:, 2] = torch.arange(rows)
    row = partial(torch.full, (rows,), device=device)
    for name, params in {
        "greedy": SampleParams(all_greedy=True),
        "temperature 1": SampleParams(),
        "temperature 0.7": SampleParams(temperature_R=row(0.7)),
        "top-k 50": SampleParams(top_k_R=row(50)),
        "top-p 0.9": SampleParams(top_p_R=row(0.9)),
    }.items():
        shape = f"{model.name}, {rows} rows, {name}"
        yield GpuCase("sample", shape, partial(sample, logits, params, keys), logits.nbytes, 0)
    shape = f"{model.name}, {rows} rows"
    yield GpuCase("top_tokens", f"{shape}, best 20", partial(top_tokens, logits, 20), logits.nbytes, 0)
    drawn = torch.randint(model.vocabulary, (rows, 1), device=device)
    yield GpuCase("token_ranks", f"{shape}, and best 5", partial(token_ranks, logits, drawn, 5), logits.nbytes, 0)


def measure(case: GpuCase, rates: Rates, device: torch.device) -> dict[str, Any]:
    """Time one case beside its floor."""
    taken = seconds(case.run, device)
    floor = max(case.num_bytes / rates.copy, case.num_operations / rates.matrix)
    return {
        "kernel": case.kernel,
        "shape": case.shape,
        "seconds": taken,
        "bytes": case.num_bytes,
        "operations": case.num_operations,
        "floor_seconds": floor,
        "share_of_floor": floor / taken,
    }


def measure_all(device: torch.device, sizes: Sizes = FULL) -> dict[str, Any]:
    """Time every kernel; each row carries what it is compared with."""
    rates = measure_rates(device, sizes)
    rows = []
    for cases in (
        elementwise_cases(sizes.model, sizes.num_tokens, device),
        attention_cases(sizes, device),
        sample_cases(sizes.model, sizes.num_rows, device),
    ):
        for case in cases:
            rows.append(measure(case, rates, device))
            torch.cuda.empty_cache()
    return {"copy_bytes_per_second": rates.copy, "matrix_operations_per_second": rates.matrix, "kernels": rows}


def main() -> int:
    """Print the rows and, last, everything as JSON."""
    if not torch.cuda.is_available():
        print("no GPU here; `make kernels` proves what can be proved without one", file=sys.stderr)
        return 2
    results = measure_all(torch.device("cuda"))
    for row in results["kernels"]:
        print(f"{row['kernel']:<36} {row['shape']:<52} {row['seconds'] * 1e6:>9.1f} us {row['share_of_floor']:>6.1%}")
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__} | results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
