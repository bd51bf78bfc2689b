"""A decoder layer of the llama kind as one call of the C++ kernels, in place of its fused modules.

In steps of few tokens the calls between the kernels cost as much as the kernels. Shapes: T tokens, E hidden size, G
key/value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from batchgen_kernels import cpu
from torch import nn

from batchgen.engine.attention import LayerAttention
from batchgen.engine.fused import FusedAttention, FusedGatedMLP, FusedRMSNorm, swap
from batchgen.engine.ops import REFERENCE
from batchgen.engine.step_inputs import StepInputs

_LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer")
"""Decoder layers that are norm, attention, sum, norm, MLP, sum, and nothing else."""

_PARTS = {
    "input_layernorm": FusedRMSNorm,
    "self_attn": FusedAttention,
    "post_attention_layernorm": FusedRMSNorm,
    "mlp": FusedGatedMLP,
}

_PROBE_TOKENS = 3
_PROBE_BLOCK = 16


class FusedDecoderLayer(nn.Module):
    """The layer over the parts of a fused one; its result overwrites its input."""

    def __init__(self, layer: nn.Module, decoder: cpu.DecoderLayer) -> None:
        super().__init__()
        self.parts = layer
        self.batchgen_attention: LayerAttention | None = None
        self._decoder = decoder
        self._attached: LayerAttention | None = None

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: Any
    ) -> torch.Tensor:
        """[1, T, E] to the same tensor."""
        attention = self.batchgen_attention
        assert attention is not None
        assert attention.step is not None
        if attention is not self._attached:
            self._decoder.attach_cache(
                attention.k_cache, attention.v_cache, attention.window, attention.k_scales, attention.v_scales
            )
            self._attached = attention
        attention.num_calls += 1
        cos, sin = position_embeddings
        self._decoder(hidden_states[0], cos[0], sin[0], attention.step.decoder_step())
        return hidden_states


def fuse_decoder_layers(model: nn.Module, attention_modules: list[nn.Module]) -> int:
    """Swap whole layers, also in the list of attention modules; returns how many.

    Called when everything in them is fused and packed. A layer that does not give the very bits of its parts stays.
    """
    swapped = swap(model, _twin)
    by_attention = {layer.self_attn: twin for layer, twin in swapped.items()}
    attention_modules[:] = [by_attention.get(module, module) for module in attention_modules]
    return len(swapped)


def _twin(layer: Any) -> nn.Module | None:
    if type(layer).__name__ not in _LAYERS or {name: type(part) for name, part in layer.named_children()} != _PARTS:
        return None
    decoder = _decoder(layer)
    if decoder is None:
        return None
    twin = FusedDecoderLayer(layer, decoder)
    attention = layer.self_attn
    return twin if torch.equal(_probe(layer, attention, attention), _probe(twin, twin, attention)) else None


def _decoder(layer: Any) -> cpu.DecoderLayer | None:
    attention, mlp = layer.self_attn, layer.mlp
    qkv, out, down = attention.qkv.kernel, attention.out.kernel, mlp.down.kernel
    # Only in bf16 are all of these products of the C++ kernels.
    if qkv is None or out is None or down is None or mlp.gated is None:
        return None
    first, second = layer.input_layernorm, layer.post_attention_layernorm
    return cpu.DecoderLayer(
        qkv,
        out,
        mlp.gated,
        down,
        (cpu.Norm(first.weight, first.eps), cpu.Norm(second.weight, second.eps)),
        num_heads=attention.sizes[0] // attention.head_dim,
        num_kv_heads=attention.sizes[1] // attention.head_dim,
        head_dim=attention.head_dim,
        scale=attention.scaling,
    )


@torch.inference_mode()
def _probe(module: nn.Module, owner: Any, attention: Any) -> torch.Tensor:
    """What the module makes of a few made-up tokens; the state of its `attention` is attached to `owner`."""
    heads, dim = attention.sizes[1] // attention.head_dim, attention.head_dim
    cache = [torch.zeros(1, heads, _PROBE_BLOCK, dim, dtype=torch.bfloat16) for _ in range(2)]
    positions = torch.arange(_PROBE_TOKENS)
    step = StepInputs(
        slots_T=positions,
        block_tables_SB=torch.zeros(1, 1, dtype=torch.int32),
        query_starts_S1=torch.tensor([0, _PROBE_TOKENS], dtype=torch.int32),
        context_lens_S=torch.tensor([_PROBE_TOKENS], dtype=torch.int32),
    )
    kernels = REFERENCE._replace(store_kv=cpu.store_kv, paged_attention=cpu.paged_attention)
    owner.batchgen_attention = LayerAttention(kernels, cache[0], cache[1], None, step)
    width = attention.qkv.in_features
    hidden = torch.linspace(-2.0, 2.0, _PROBE_TOKENS * width).mul(7.0).sin().view(1, _PROBE_TOKENS, width)
    angles = torch.linspace(0.0, 3.0, _PROBE_TOKENS * dim // 2).view(1, _PROBE_TOKENS, -1).repeat(1, 1, 2)
    rope = (angles.cos().bfloat16(), angles.sin().bfloat16())
    out: torch.Tensor = module(hidden_states=hidden.bfloat16(), position_embeddings=rope)
    return out
