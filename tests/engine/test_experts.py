"""Packed experts and routers: what transformers computes, and each token by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batchgen.engine.aligned import align_functions
from batchgen.engine.experts import PackedExperts, pack_experts
from batchgen.engine.linear import pack_linears
from tests.engine.families import small_model

FAMILIES = {"mixtral": 4, "gpt_oss": 4, "granitemoe": 2, "deepseek_v3": 2}
"""Mixtures of experts of different builds, and how many of their modules are packed."""


def hidden(model: nn.Module, num_tokens: int) -> Tensor:
    config: Any = model.config
    return torch.randn(num_tokens, config.hidden_size, generator=torch.Generator().manual_seed(0))


def mixtures(model: nn.Module) -> list[nn.Module]:
    """The outermost modules that hold experts and router."""
    found = [module for name, module in model.named_modules() if name.endswith((".mlp", ".block_sparse_moe"))]
    return [module for module in found if any("xpert" in type(child).__name__ for child in module.modules())]


def run(module: nn.Module, x_TE: Tensor) -> Tensor:
    with torch.inference_mode():
        result = module(x_TE[None])
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out.view(x_TE.shape)


@pytest.mark.parametrize("family", FAMILIES)
def test_mixtures_compute_what_they_did_and_each_token_by_itself(family: str) -> None:
    model = small_model(family).requires_grad_(False)
    modules = mixtures(model)
    assert modules, "no experts in this model"
    x_TE = hidden(model, 37)
    expected = [run(module, x_TE) for module in modules]
    assert pack_experts(model) >= len(modules)
    pack_linears(model)  # Some have shared experts beside the routed ones.
    for module in modules:
        align_functions(module, lambda module=module: run(module, x_TE))  # type: ignore[misc]
    for module, before in zip(modules, expected, strict=True):
        whole = run(module, x_TE)
        torch.testing.assert_close(whole, before, rtol=1e-4, atol=1e-5)
        for count in (1, 2, 3, 8, 17):
            assert torch.equal(run(module, x_TE[:count]), whole[:count])


def test_weights_of_packed_experts_are_released() -> None:
    model = small_model("mixtral").requires_grad_(False)
    pack_experts(model)
    packed = [module for module in model.modules() if isinstance(module.forward, PackedExperts)]
    assert packed
    for module in packed:
        assert (module.gate_up_proj, module.down_proj) == (None, None)


def test_a_model_without_experts_has_nothing_to_pack() -> None:
    assert pack_experts(small_model("llama")) == 0
