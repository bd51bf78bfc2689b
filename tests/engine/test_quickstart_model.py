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


def greedy(directory: Path, dtype: str, prompts: list[list[int]], lengths: list[int]) -> list[Sample]:
    """Each prompt's greedy sample, with log-probabilities."""
    engine = Engine(str(directory), dtype=dtype, device="cpu", kv_cache_memory="256MiB")
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, logprobs=0) for length in lengths]
    found = {c.prompt_index: c.samples[0] for c in engine.generate(prompts, params)}
    return [found[index] for index in range(len(prompts))]


def logprobs_of(model: PreTrainedModel, prompts: list[list[int]], samples: list[Sample]) -> torch.Tensor:
    """[tokens, vocabulary]: what the model says where each generated token was chosen."""
    rows = []
    for prompt, sample in zip(prompts, samples, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + sample.token_ids]), use_cache=False).logits
        rows.append(logits[0, len(prompt) - 1 : -1].float().log_softmax(-1))
    return torch.cat(rows)


def test_float32_ids_equal_those_of_transformers(smollm2: Path, eager: PreTrainedModel) -> None:
    prompts, lengths = workload(8)
    lengths = [min(length, 48) for length in lengths]
    samples = greedy(smollm2, "float32", prompts, lengths)
    for prompt, length, sample in zip(prompts, lengths, samples, strict=True):
        config = GenerationConfig(max_new_tokens=length, do_sample=False, eos_token_id=None, pad_token_id=0)
        with torch.inference_mode():
            expected = eager.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :]
        assert sample.token_ids == expected.tolist()


def test_bfloat16_strays_no_further_than_that_of_transformers(smollm2: Path, eager: PreTrainedModel) -> None:
    """Some contexts are so sensitive that bfloat16 turns a choice by a few tenths, in any implementation."""
    prompts, lengths = workload(32)
    samples = greedy(smollm2, "bfloat16", prompts, lengths)
    chosen = torch.tensor([[token] for sample in samples for token in sample.token_ids])
    truth = logprobs_of(eager, prompts, samples)
    true_chosen = truth.gather(1, chosen)[:, 0]

    def gaps(tokens: torch.Tensor) -> torch.Tensor:
        return truth.amax(-1) - truth.gather(1, tokens)[:, 0]

    def errors(logprobs: torch.Tensor) -> torch.Tensor:
        return (logprobs - true_chosen).abs()

    ours = errors(torch.tensor([token[0].logprob for sample in samples for token in sample.logprobs or ()]))
    peer_gaps, peer_errors = [], []
    for attention in ("eager", "sdpa"):
        peer = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16, attn_implementation=attention)
        theirs = logprobs_of(peer.eval(), prompts, samples)
        peer_gaps.append(gaps(theirs.argmax(-1, keepdim=True)))
        peer_errors.append(errors(theirs.gather(1, chosen)[:, 0]))

    assert gaps(chosen).mean() <= min(MEAN_GAP, *(peer.mean() for peer in peer_gaps))
    assert gaps(chosen).max() <= max(peer.max() for peer in peer_gaps)
    assert ours.square().mean() <= min(peer.square().mean() for peer in peer_errors)
    assert ours.max() <= max(peer.max() for peer in peer_errors)


def rows_of(directory: Path, dtype: str, **options: Any) -> list[list[Sample]]:
    """By row: the samples of 12 rows with all kinds of sampling, from one engine with these options."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.8, "n": 2},
        {"temperature": 0, "repetition_penalty": 1.2, "min_tokens": 6},
        {"top_p": 0.9, "logprobs": 3},
    ]
    prompts, _ = workload(12)
    params = [SamplingParams(max_tokens=6 + row % 7, seed=1, **kinds[row % 3]) for row in range(12)]
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
