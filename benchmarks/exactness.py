"""What bf16 and int8 cost in exactness: the log-probabilities of prompts' tokens beside those in fp32.

    python -m benchmarks.exactness [--prompts 12] [--model MODEL] [--json FILE]

The longest prompts of the workload `plain`. Perplexity is exp of the mean negative log-probability of a token given
those before it; `distance` is how far that log-probability is from the one in fp32, on average over all tokens. `gap`
is what the choice of the most likely next token costs: how much less likely it is in fp32 than fp32's own, on average.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

from batchgen import Engine, SamplingParams
from batchgen.records import TokenLogprob
from benchmarks.throughput import MODEL

ALTERNATIVES = 20
"""Tokens of each position whose log-probabilities are known."""

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
    found = {name: positions(options.model, prompts, variant) for name, variant in VARIANTS.items()}
    exact = found["fp32"]
    results = [
        {
            "variant": name,
            "tokens": len(ours),
            "perplexity": math.exp(-statistics.fmean(each[0].logprob for each in ours)),
            "distance": statistics.fmean(
                abs(mine[0].logprob - theirs[0].logprob) for mine, theirs in zip(ours, exact, strict=True)
            ),
            "gap": statistics.fmean(gap(best(mine).token_id, theirs) for mine, theirs in zip(ours, exact, strict=True)),
        }
        for name, ours in found.items()
    ]
    print(f"{'variant':24} {'tokens':>7} {'perplexity':>11} {'distance':>9} {'gap':>9}")
    for result in results:
        print("{variant:24} {tokens:7} {perplexity:11.3f} {distance:9.4f} {gap:9.5f}".format_map(result))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def positions(model: str, prompts: list[list[int]], variant: dict[str, Any]) -> list[list[TokenLogprob]]:
    """For every token of the prompts but their first ones: that token, and the most likely ones beside it."""
    engine = Engine(model, device="cpu", **variant)
    params = SamplingParams(max_tokens=1, prompt_logprobs=ALTERNATIVES, temperature=0)
    rows: dict[int, list[list[TokenLogprob]]] = {}
    for completion in engine.generate(prompts, params):
        assert completion.prompt_logprobs is not None, completion.error
        rows[completion.prompt_index] = [entries for entries in completion.prompt_logprobs if entries is not None]
    return [entries for index in sorted(rows) for entries in rows[index]]


def best(entries: list[TokenLogprob]) -> TokenLogprob:
    """The most likely token."""
    return min(entries, key=lambda entry: entry.rank)


def gap(token_id: int, exact: list[TokenLogprob]) -> float:
    """How much less likely a token is than the best one; as much as the last of those known, if it is none of them."""
    known = {entry.token_id: entry.logprob for entry in exact}
    return best(exact).logprob - known.get(token_id, min(known.values()))


if __name__ == "__main__":
    main()
