"""Hot modules of llama-like models, swapped at load for ones that do the same in few calls.

A swap is by structure and checked by value: a module that does not compute what the original computes, on weights as
they are and made-up inputs, is left out. Shapes: T tokens, E hidden size, I inner size, H query heads, G key/value
heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from batchgen_kernels import cpu
from torch import nn

from batchgen.engine.linear import PackedLinear, checked_product, packed_product

ROUNDING_STEPS = 16
"""A swapped module may differ by this many roundings of its largest result, and by √K for a sum of K terms, whose
roundings add up like the steps of a random walk."""

_PROBE_TOKENS = 3
_ATTENTIONS = ("LlamaAttention", "MistralAttention", "Qwen2Attention")
"""Attention classes that are projections, rotation of whole heads, attention and projection, and nothing else."""


class FusedRMSNorm(nn.Module):
    """x / rms(x) * weight in one pass."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self.eps = norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., E] to the same shape."""
        return cpu.rms_norm(x.reshape(-1, x.shape[-1]), self.weight, self.eps).view(x.shape)


class FusedGatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one product; in bf16 without biases the gating is part of it."""

    def __init__(self, mlp: Any, int8: bool = False) -> None:
        super().__init__()
        gate, up = mlp.gate_proj, mlp.up_proj
        plain = gate.weight.dtype == torch.bfloat16 and gate.bias is None and up.bias is None
        self.gated = cpu.PackedGatedLinear(gate.weight, up.weight, int8=int8) if plain else None
        self.gate_up = None if plain else _packed("gate_proj and up_proj", gate, up, int8=int8)
        self.down = _packed("down_proj", mlp.down_proj, int8=int8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., E] to the same shape."""
        rows_TE = x.reshape(-1, x.shape[-1])
        if self.gated is not None:
            inner_TI = self.gated(rows_TE)
        else:
            assert self.gate_up is not None
            inner_TI = cpu.silu_mul(self.gate_up(rows_TE))
        out: torch.Tensor = self.down(inner_TI)
        return out.view(x.shape)


class FusedAttention(nn.Module):
    """Projections in one product, rotation, paged attention, output projection."""

    def __init__(self, attention: Any, int8: bool = False) -> None:
        super().__init__()
        self.batchgen_attention: Callable[..., torch.Tensor] | None = None
        self.layer_idx = attention.layer_idx
        self.scaling = attention.scaling
        self.head_dim = attention.head_dim
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.sizes = [linear.out_features for linear in projections]
        self.qkv = _packed("q_proj, k_proj and v_proj", *projections, int8=int8)
        self.out = _packed("o_proj", attention.o_proj, int8=int8)

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: Any
    ) -> tuple[torch.Tensor, None]:
        """[1, T, E] to the same shape, and None where transformers has attention weights."""
        parts = self.qkv(hidden_states[0]).split(self.sizes, dim=-1)
        q_THD, k_TGD, v_TGD = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        cos, sin = position_embeddings
        q_THD, k_TGD = cpu.rotary(q_THD, k_TGD, cos[0], sin[0])
        assert self.batchgen_attention is not None
        out_THD = self.batchgen_attention(q_THD, k_TGD, v_TGD, scale=self.scaling, softcap=None, sinks_H=None)
        return self.out(out_THD.flatten(1)).unsqueeze(0), None


def fuse_layers(model: nn.Module, int8: bool = False) -> int:
    """Swap norms and MLPs; returns how many. Called before their products are packed one by one.

    Twins with int8 weights take the place of those that were found equal with the weights as they are.
    """
    return len(swap(model, lambda module: _layer_twin(module, int8)))


def fuse_attention(model: nn.Module, attention_modules: list[nn.Module], int8: bool = False) -> int:
    """Swap attention modules, also in the list of them; returns how many.

    The new ones do not go through transformers' AttentionInterface: whoever wants to see its calls comes before.
    """
    swapped = swap(model, lambda module: _attention_twin(module, int8))
    attention_modules[:] = [swapped.get(module, module) for module in attention_modules]
    return len(swapped)


def swap(model: nn.Module, twin_of: Callable[[Any], nn.Module | None]) -> dict[nn.Module, nn.Module]:
    """Put the twin of each module that has one in its place; returns the twin of each module swapped."""
    swapped: dict[nn.Module, nn.Module] = {}
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            twin = twin_of(module)
            if twin is not None:
                swapped[module] = twin
                setattr(parent, name, twin)
    return swapped


def _layer_twin(module: Any, int8: bool) -> nn.Module | None:
    if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
        width = len(module.weight)
        return _equal(module, FusedRMSNorm(module), width, _on_hidden(width, module.weight.dtype))
    if _is_gated_mlp(module):
        run = _on_hidden(module.gate_proj.in_features, module.gate_proj.weight.dtype)
        twin = _equal(module, FusedGatedMLP(module), module.down_proj.in_features, run)
        return FusedGatedMLP(module, int8=True) if twin is not None and int8 else twin
    return None


def _attention_twin(module: Any, int8: bool) -> nn.Module | None:
    if type(module).__name__ not in _ATTENTIONS or not all(type(child) is nn.Linear for child in module.children()):
        return None
    twin = _equal(module, FusedAttention(module), module.q_proj.in_features, _on_attention(module))
    return FusedAttention(module, int8=True) if twin is not None and int8 else twin


@torch.inference_mode()
def _equal(
    module: nn.Module, twin: nn.Module, num_terms: int, run: Callable[[nn.Module], torch.Tensor]
) -> nn.Module | None:
    """The twin if it computes what the module does, with sums of `num_terms` at the most; else None."""
    expected, actual = run(module).float(), run(twin).float()
    eps = torch.finfo(next(module.parameters()).dtype).eps
    allowed = (ROUNDING_STEPS + math.sqrt(num_terms)) * eps * expected.abs().max()
    return twin if bool((expected - actual).abs().max() <= allowed) else None


def _is_gated_mlp(module: Any) -> bool:
    names = [name for name, _ in module.named_children()]
    linears = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if sorted(names) != ["act_fn", "down_proj", "gate_proj", "up_proj"]:
        return False
    return all(type(linear) is nn.Linear for linear in linears) and type(module.act_fn).__name__ == "SiLUActivation"


def _on_hidden(width: int, dtype: torch.dtype) -> Callable[[nn.Module], torch.Tensor]:
    x = torch.linspace(-2.0, 2.0, _PROBE_TOKENS * width).mul(7.0).sin().view(1, _PROBE_TOKENS, width).to(dtype)
    return lambda module: module(x)


def _on_attention(module: Any) -> Callable[[Any], torch.Tensor]:
    dtype = module.q_proj.weight.dtype
    x = torch.linspace(-2.0, 2.0, _PROBE_TOKENS * module.q_proj.in_features).mul(7.0).sin()
    angles = torch.linspace(0.0, 3.0, _PROBE_TOKENS * module.head_dim // 2).view(1, _PROBE_TOKENS, -1).repeat(1, 1, 2)
    rope = (angles.cos().to(dtype), angles.sin().to(dtype))

    def mix(q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, **_: Any) -> torch.Tensor:
        repeats = q_THD.shape[1] // k_TGD.shape[1]
        return q_THD + 0.5 * k_TGD.repeat_interleave(repeats, 1) + 2.0 * v_TGD.repeat_interleave(repeats, 1)

    def run(attention: Any) -> torch.Tensor:
        attention.batchgen_attention = mix
        hidden = x.view(1, _PROBE_TOKENS, -1).to(dtype)
        out: torch.Tensor = attention(hidden_states=hidden, position_embeddings=rope, attention_mask=None)[0]
        return out

    return run


def _packed(name: str, *linears: nn.Linear, int8: bool = False) -> PackedLinear:
    """One product whose outputs are those of `linears`, one after the other.

    As it is, it is checked with the module that it becomes part of; with int8 weights here, where the error is known.
    """
    weight = torch.cat([linear.weight for linear in linears])
    bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
    product = checked_product(name, weight, bias, int8=True) if int8 else packed_product(weight, bias)
    return PackedLinear(product, weight.shape[1], weight.shape[0])
