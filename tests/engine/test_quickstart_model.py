"""The quickstart model against transformers: equal ids in float32, near-ties only in bfloat16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from batchgen.engine.engine import Engine
from batchgen.records import Sample
from batchgen.sampling_params import SamplingParams

pytestmark = pytest.mark.slow

WORKLOAD = Path(__file__).parents[2] / "benchmarks" / "workloads" / "plain.json"
MEAN_GAP = 0.001
"""In log-probability to the float32 argmax, over all tokens."""
MAX_GAP = 0.2


@pytest.fixture(scope="module")
def eager(smollm2: Path) -> PreTrainedModel:
    """transformers' own model in float32."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        smollm2, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def workload(count: int) -> tuple[list[list[int]], list[int]]:
    contents = json.loads(WORKLOAD.read_text())
    return contents["prompts"][:count], contents["max_new"][:count]


def greedy(directory: Path, dtype: str, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
    engine = Engine(str(directory), dtype=dtype, device="cpu", kv_cache_memory="256MiB")
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
    found = {c.prompt_index: c.samples[0].token_ids for c in engine.generate(prompts, params)}
    return [found[index] for index in range(len(prompts))]


def test_float32_ids_equal_those_of_transformers(smollm2: Path, eager: PreTrainedModel) -> None:
    prompts, lengths = workload(8)
    lengths = [min(length, 48) for length in lengths]
    for prompt, length, ids in zip(prompts, lengths, greedy(smollm2, "float32", prompts, lengths), strict=True):
        config = GenerationConfig(max_new_tokens=length, do_sample=False, eos_token_id=None, pad_token_id=0)
        with torch.inference_mode():
            expected = eager.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :]
        assert ids == expected.tolist()


def test_bfloat16_strays_from_the_float32_argmax_at_near_ties_only(smollm2: Path, eager: PreTrainedModel) -> None:
    prompts, lengths = workload(32)
    gaps: list[float] = []
    for prompt, ids in zip(prompts, greedy(smollm2, "bfloat16", prompts, lengths), strict=True):
        with torch.inference_mode():
            logits = eager(torch.tensor([prompt + ids]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1)
        chosen = logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0]
        gaps += (logprobs.amax(-1) - chosen).tolist()
    assert sum(gaps) / len(gaps) <= MEAN_GAP
    assert max(gaps) <= MAX_GAP


def rows_of(directory: Path, dtype: str, **options: Any) -> list[list[Sample]]:
    """By row: the samples of 12 rows with all kinds of sampling, from one engine with these options."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.8, "n": 2},
        {"temperature": 0, "repetition_penalty": 1.2, "min_tokens": 6},
        {"top_p": 0.9, "logprobs": 3},
    ]
    prompts, _ = workload(12)
    params = [SamplingParams(max_tokens=5 + row % 7, seed=1, **kinds[row % 3]) for row in range(12)]
    engine = Engine(str(directory), dtype=dtype, device="cpu", kv_cache_memory="128MiB", **options)
    completions = engine.generate((prompt[: 30 + 9 * row] for row, prompt in enumerate(prompts)), params)
    samples = {completion.prompt_index: completion.samples for completion in completions}
    return [samples[row] for row in range(12)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_the_same_bytes_however_many_run_at_once(smollm2: Path, dtype: str) -> None:
    whole = rows_of(smollm2, dtype, max_sequences=8)
    for options in (
        {"max_sequences": 5},
        {"max_sequences": 1, "prefix_caching": False},
        {"max_sequences": 5, "max_batch_tokens": 16, "threads": 2},
    ):
        assert rows_of(smollm2, dtype, **options) == whole, options
