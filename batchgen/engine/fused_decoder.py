"""The decoder layers of llama-like models as one call of the C++ kernels, in place of their fused modules.

In steps of few tokens the calls between the kernels cost as much as the kernels. Shapes: T tokens, E hidden size, G
key/value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from batchgen_kernels import cpu
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from batchgen.engine.attention import LayerAttention
from batchgen.engine.fused import FusedAttention, FusedGatedMLP, FusedRMSNorm, swap
from batchgen.engine.ops import REFERENCE
from batchgen.engine.step_inputs import StepInputs

_LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer")
"""Decoder layers that are norm, attention, sum, norm, MLP, sum, and nothing else."""

_BACKBONES = ("LlamaModel", "MistralModel", "Qwen2Model")
"""Models that are embedding, decoder layers and norm, with one rotation for all layers, and nothing else."""

_PARTS = {
    "input_layernorm": FusedRMSNorm,
    "self_attn": FusedAttention,
    "post_attention_layernorm": FusedRMSNorm,
    "mlp": FusedGatedMLP,
}

_FIRST_ANGLES = 1024
"""Positions in the first table of angles."""

_PROBE_TOKENS = 3
_PROBE_BLOCK = 16


class FusedDecoderLayer(nn.Module):
    """The layer over the parts of a fused one; its result overwrites its input."""

    def __init__(self, layer: nn.Module, decoder: cpu.DecoderLayer) -> None:
        super().__init__()
        self.parts = layer
        self.decoder = decoder
        self.batchgen_attention: LayerAttention | None = None
        self._stack = cpu.DecoderStack([decoder])
        self._attached: LayerAttention | None = None

    def begin(self) -> cpu.DecoderStep:
        """Get ready to be called, alone or in a stack, for the step that is returned."""
        attention = self.batchgen_attention
        assert attention is not None
        assert attention.step is not None
        if attention is not self._attached:
            self.decoder.attach_cache(
                attention.k_cache, attention.v_cache, attention.window, attention.k_scales, attention.v_scales
            )
            self._attached = attention
        attention.num_calls += 1
        return attention.step.decoder_step()

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: Any
    ) -> torch.Tensor:
        """[1, T, E] to the same tensor."""
        cos, sin = position_embeddings
        self._stack(hidden_states[0], cos[0], sin[0], self.begin())
        return hidden_states


class FusedDecoder(nn.Module):
    """The backbone over its own parts, all layers in one call; a mask is not made, since paged attention reads none."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.embed_tokens, self.layers = backbone.embed_tokens, backbone.layers
        self.norm, self.rotary_emb = backbone.norm, backbone.rotary_emb
        self._stack = cpu.DecoderStack([layer.decoder for layer in backbone.layers])
        self._angles: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **_: Any) -> BaseModelOutputWithPast:
        """Token ids [1, T] to hidden states [1, T, E]."""
        hidden = self.embed_tokens(input_ids)
        cos_TR, sin_TR = self._angles_at(position_ids[0], hidden)
        step, *_others = [layer.begin() for layer in self.layers]
        self._stack(hidden[0], cos_TR, sin_TR, step)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))

    def _angles_at(self, positions_T: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [T, R] in the dtype of `like`, from a table: they depend on a token's position alone."""
        needed = int(positions_T.max()) + 1
        if self._angles is None or needed > len(self._angles[0]):
            positions = torch.arange(max(_FIRST_ANGLES, 2 * needed)).unsqueeze(0)
            cos, sin = self.rotary_emb(like, positions)
            self._angles = cos[0], sin[0]
        cos_PR, sin_PR = self._angles
        return cos_PR.index_select(0, positions_T), sin_PR.index_select(0, positions_T)


def fuse_decoder_layers(model: nn.Module, attention_modules: list[nn.Module]) -> int:
    """Swap whole layers, also in the list of attention modules, and the backbone over them; returns how many layers.

    Called when everything in them is fused and packed. What does not give the very bits of its parts stays.
    """
    swapped = swap(model, _twin)
    by_attention = {layer.self_attn: twin for layer, twin in swapped.items()}
    attention_modules[:] = [by_attention.get(module, module) for module in attention_modules]
    swap(model, _backbone_twin)
    return len(swapped)


def _backbone_twin(backbone: Any) -> nn.Module | None:
    names = {name for name, _ in backbone.named_children()}
    if type(backbone).__name__ not in _BACKBONES or names != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return None
    if not all(type(layer) is FusedDecoderLayer for layer in backbone.layers):
        return None
    twin = FusedDecoder(backbone)
    return twin if torch.equal(_probe_backbone(backbone), _probe_backbone(twin)) else None


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
    dim = attention.head_dim
    owner.batchgen_attention = _probe_state(attention.sizes[1] // dim, dim)
    width = attention.qkv.in_features
    hidden = torch.linspace(-2.0, 2.0, _PROBE_TOKENS * width).mul(7.0).sin().view(1, _PROBE_TOKENS, width)
    angles = torch.linspace(0.0, 3.0, _PROBE_TOKENS * dim // 2).view(1, _PROBE_TOKENS, -1).repeat(1, 1, 2)
    rope = (angles.cos().bfloat16(), angles.sin().bfloat16())
    out: torch.Tensor = module(hidden_states=hidden.bfloat16(), position_embeddings=rope)
    return out


@torch.inference_mode()
def _probe_backbone(backbone: Any) -> torch.Tensor:
    """The hidden states of the first few token ids. Each layer writes before it reads, so one cache does for all."""
    attention = backbone.layers[0].parts.self_attn
    state = _probe_state(attention.sizes[1] // attention.head_dim, attention.head_dim)
    for layer in backbone.layers:
        layer.batchgen_attention = state
    positions = torch.arange(_PROBE_TOKENS).unsqueeze(0)
    out: torch.Tensor = backbone(input_ids=positions, position_ids=positions, use_cache=False).last_hidden_state
    return out


def _probe_state(kv_heads: int, head_dim: int) -> LayerAttention:
    """One sequence of a few tokens in one block."""
    k_cache, v_cache = (torch.zeros(1, kv_heads, _PROBE_BLOCK, head_dim, dtype=torch.bfloat16) for _ in range(2))
    step = StepInputs(
        slots_T=torch.arange(_PROBE_TOKENS),
        block_tables_SB=torch.zeros(1, 1, dtype=torch.int32),
        query_starts_S1=torch.tensor([0, _PROBE_TOKENS], dtype=torch.int32),
        context_lens_S=torch.tensor([_PROBE_TOKENS], dtype=torch.int32),
    )
    kernels = REFERENCE._replace(store_kv=cpu.store_kv, paged_attention=cpu.paged_attention)
    return LayerAttention(kernels, k_cache, v_cache, None, step)
