"""What bf16 and int8 cost in exactness: the log-probabilities of prompts' tokens beside those in fp32.

    python -m benchmarks.exactness [--prompts 12] [--model MODEL] [--json FILE]

The longest prompts of the workload `plain`. Perplexity is exp of the mean negative log-probability of a token given
those before it; the gap is how far that log-probability is from the one in fp32, on average over all tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

from batchgen import Engine, SamplingParams
from benchmarks.throughput import MODEL

VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "int8 KV": {"dtype": "bfloat16", "kv_dtype": "int8"},
    "int8 weights and inputs": {"dtype": "bfloat16", "quantization": "int8"},
    "int8 both": {"dtype": "bfloat16", "kv_dtype": "int8", "quantization": "int8"},
}


def main() -> None:
    """Print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    workload = json.loads((Path(__file__).parent / "workloads" / "plain.json").read_text())
    prompts = sorted(workload["prompts"], key=len, reverse=True)[: options.prompts]
    found = {name: logprobs(options.model, prompts, variant) for name, variant in VARIANTS.items()}
    exact = found["fp32"]
    results = [
        {
            "variant": name,
            "tokens": len(ours),
            "perplexity": math.exp(-statistics.fmean(ours)),
            "mean_gap": statistics.fmean(abs(a - b) for a, b in zip(ours, exact, strict=True)),
        }
        for name, ours in found.items()
    ]
    print(f"{'variant':24} {'tokens':>7} {'perplexity':>11} {'mean gap':>9}")
    for result in results:
        print("{variant:24} {tokens:7} {perplexity:11.3f} {mean_gap:9.4f}".format_map(result))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def logprobs(model: str, prompts: list[list[int]], variant: dict[str, Any]) -> list[float]:
    """The log-probability of every token of the prompts but their first ones."""
    engine = Engine(model, device="cpu", **variant)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    rows: dict[int, list[float]] = {}
    for completion in engine.generate(prompts, params):
        assert completion.prompt_logprobs is not None, completion.error
        rows[completion.prompt_index] = [entry[0].logprob for entry in completion.prompt_logprobs if entry is not None]
    return [logprob for index in sorted(rows) for logprob in rows[index]]


if __name__ == "__main__":
    main()
