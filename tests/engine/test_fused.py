"""Fused modules take the place of what they equal, and of nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from batchgen_kernels import cpu
from torch import nn

from batchgen import BeamParams, Engine, SamplingParams
from batchgen.engine import independent_rows
from batchgen.engine.attention import ATTENTION_NAME
from batchgen.engine.fused import FusedAttention, FusedGatedMLP, FusedRMSNorm, fuse_attention, fuse_layers
from batchgen.engine.fused_decoder import FusedCausalLM, FusedDecoderLayer
from batchgen.engine.independent_rows import make_rows_independent
from batchgen.engine.miniature import random_model
from tests.engine.models import config_of, save_model

pytestmark = pytest.mark.skipif(not cpu.is_available(), reason="the C++ kernels are not built")


def kinds(model: nn.Module) -> dict[type, int]:
    found = [type(module) for module in model.modules()]
    return {kind: found.count(kind) for kind in (FusedRMSNorm, FusedGatedMLP, FusedAttention)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "windowed"])
def test_every_hot_module_of_a_llama_like_model_is_swapped(kind: Any, dtype: torch.dtype) -> None:
    model = random_model(config_of(kind), ATTENTION_NAME).to(dtype)
    modules: list[nn.Module] = [layer.self_attn for layer in model.model.layers]
    assert fuse_layers(model) == 7
    assert fuse_attention(model, modules) == 2
    assert kinds(model) == {FusedRMSNorm: 5, FusedGatedMLP: 2, FusedAttention: 2}
    assert modules == [layer.self_attn for layer in model.model.layers]


def test_norms_and_mlps_compute_what_they_replace() -> None:
    config = config_of("plain")
    model, twin = random_model(config, "eager"), random_model(config, "eager")
    fuse_layers(twin)
    x = torch.randn(1, 5, config.hidden_size, generator=torch.Generator().manual_seed(0))
    for name in ("mlp", "input_layernorm", "post_attention_layernorm"):
        expected = getattr(model.model.layers[0], name)(x)
        torch.testing.assert_close(getattr(twin.model.layers[0], name)(x), expected, rtol=1e-5, atol=1e-6)


def test_modules_of_another_build_are_left_alone() -> None:
    # Gemma's norm scales by 1 + weight and its MLP has gelu; GPT-2 has neither norm nor gate.
    for kind in ("capped", "learned"):
        model = random_model(config_of(kind), "eager")
        assert fuse_layers(model) == 0
        assert fuse_attention(model, []) == 0


def test_a_module_that_looks_the_same_but_computes_something_else_is_left_alone() -> None:
    model = random_model(config_of("plain"), "eager")
    norm, mlp = model.model.norm, model.model.layers[0].mlp
    norm.forward = lambda x: 1.01 * type(norm).forward(norm, x)
    mlp.forward = lambda x: type(mlp).forward(mlp, x) + 0.01
    fuse_layers(model)
    assert model.model.norm is norm
    assert model.model.layers[0].mlp is mlp


@pytest.mark.parametrize("kind", ["plain", "windowed"])
def test_whole_layers_become_one_call_with_the_same_bits(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = (random_model(config_of(kind), ATTENTION_NAME).to(torch.bfloat16) for _ in range(2))
    modules: list[nn.Module] = [layer.self_attn for layer in whole.model.layers]
    assert isinstance(make_rows_independent(whole, modules), FusedCausalLM)
    assert [type(module) for module in modules] == [FusedDecoderLayer] * 2
    assert modules == list(whole.model.layers)
    # A layer whose bits differ from those of its parts is not swapped.
    add = FusedGatedMLP.forward
    monkeypatch.setattr(FusedGatedMLP, "forward", lambda self, x: add(self, x) * 1.01)
    modules = [layer.self_attn for layer in parts.model.layers]
    assert make_rows_independent(parts, modules) is None
    assert not any(isinstance(module, FusedDecoderLayer) for module in parts.modules())


@pytest.mark.parametrize("part", ["the model", "its backbone"])
def test_a_model_that_does_more_than_its_parts_stays(part: str) -> None:
    model = random_model(config_of("plain"), ATTENTION_NAME).to(torch.bfloat16)
    outer = model if part == "the model" else model.model
    forward = outer.forward

    def scaled(**inputs: Any) -> Any:
        out = forward(**inputs)
        for name in {"logits", "last_hidden_state"} & set(out):
            out[name] = out[name] * 1.01
        return out

    outer.forward = scaled
    modules: list[nn.Module] = [layer.self_attn for layer in model.model.layers]
    assert make_rows_independent(model, modules) is None
    assert [type(module) for module in modules] == [FusedDecoderLayer] * 2


def test_layers_in_fp32_stay_modules() -> None:
    model = random_model(config_of("plain"), ATTENTION_NAME)
    modules: list[nn.Module] = [layer.self_attn for layer in model.model.layers]
    make_rows_independent(model, modules)
    assert [type(module) for module in modules] == [FusedAttention] * 2


def test_an_engine_gives_the_same_with_its_model_in_one_call_and_in_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_model(tmp_path, "plain", torch.bfloat16)
    common: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True, "seed": 3}
    params = [
        SamplingParams(temperature=0, prompt_logprobs=2, logprobs=1, **common),
        SamplingParams(temperature=0.9, n=3, top_k=20, prompt_logprobs=0, **common),
        SamplingParams(beam=BeamParams(width=3, num_return=2), **common),
        SamplingParams(temperature=1.1, top_p=0.9, repetition_penalty=1.2, **common),
    ]
    start = list(range(2, 42))
    prompts = [[*start, *range(50, 50 + 7 * row)] for row in range(12)]
    each = [params[row % len(params)] for row in range(12)]

    def results(*, in_one_call: bool) -> list[tuple[Any, Any]]:
        if not in_one_call:
            monkeypatch.setattr(independent_rows, "fuse_model", lambda model: None)
        options: dict[str, Any] = {"dtype": "bfloat16", "device": "cpu", "block_size": 16, "kv_cache_memory": "1MiB"}
        engine = Engine(str(directory), max_batch_tokens=48, max_sequences=8, **options)
        assert (engine._runner._fused is not None) == in_one_call  # type: ignore[attr-defined]
        found = {completion.prompt_index: completion for completion in engine.generate(prompts, each)}
        assert all(completion.error is None for completion in found.values())
        return [(found[row].samples, found[row].prompt_logprobs) for row in range(12)]

    assert results(in_one_call=True) == results(in_one_call=False)
