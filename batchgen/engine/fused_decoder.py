"""Llama-like models as one call of the C++ kernels, in place of their fused modules; or their decoder layers alone.

In steps of few tokens the calls between the kernels cost as much as the kernels. Shapes: T tokens, E hidden size, G
key/value heads, D head size, P positions, R features that are rotated, W tokens whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from array import array
from typing import Any

import torch
from batchgen_kernels import cpu
from torch import nn

from batchgen.engine.attention import LayerAttention
from batchgen.engine.fused import FusedAttention, FusedGatedMLP, FusedRMSNorm, swap
from batchgen.engine.linear import PackedLinear
from batchgen.engine.ops import REFERENCE
from batchgen.engine.step_inputs import StepInputs

_LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer")
"""Decoder layers that are norm, attention, sum, norm, MLP, sum, and nothing else."""

_MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
"""Models that are embedding, decoder layers, norm and head, with one rotation for all layers, and nothing else."""

_CHILDREN = {"embed_tokens", "layers", "norm", "rotary_emb"}
"""What they have below their head."""

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
        self.decoder = decoder
        self._stack = cpu.DecoderStack([decoder])
        self._attention: LayerAttention | None = None

    @property
    def batchgen_attention(self) -> LayerAttention | None:
        """The state of its attention, for which it also gets ready to be called in a stack."""
        return self._attention

    @batchgen_attention.setter
    def batchgen_attention(self, state: LayerAttention) -> None:
        self._attention = state
        self.decoder.attach_cache(state.k_cache, state.v_cache, state.window, state.k_scales, state.v_scales)

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: Any
    ) -> torch.Tensor:
        """[1, T, E] to the same tensor."""
        attention = self._attention
        assert attention is not None
        assert attention.step is not None
        attention.num_calls += 1
        cos, sin = position_embeddings
        self._stack(hidden_states[0], cos[0], sin[0], attention.step.decoder_step())
        return hidden_states


class FusedCausalLM:
    """The whole model in one call, from token ids to logits; a mask is not made, since paged attention reads none."""

    def __init__(self, model: Any, head: cpu.PackedLinear) -> None:
        backbone = model.model
        embedding_VE = backbone.embed_tokens.weight

        def angles_of(num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
            # They depend on a token's position alone.
            cos_1PR, sin_1PR = backbone.rotary_emb(embedding_VE, torch.arange(num_positions).unsqueeze(0))
            return cos_1PR[0], sin_1PR[0]

        self.layers: list[FusedDecoderLayer] = list(backbone.layers)
        norm = cpu.Norm(backbone.norm.weight, backbone.norm.eps)
        self._model = cpu.DecoderModel(embedding_VE, [layer.decoder for layer in self.layers], norm, head, angles_of)

    def __call__(self, chunks: cpu.TokenChunks, block_tables_SB: torch.Tensor) -> torch.Tensor:
        """The logits [W, V] of the tokens that are wanted, until the next call."""
        return self._model(chunks, block_tables_SB)


def fuse_decoder_layers(model: nn.Module, attention_modules: list[nn.Module]) -> int:
    """Swap whole layers, also in the list of attention modules; returns how many.

    Called when everything in them is fused and packed. What does not give the very bits of its parts stays.
    """
    swapped = swap(model, _twin)
    by_attention = {layer.self_attn: twin for layer, twin in swapped.items()}
    attention_modules[:] = [by_attention.get(module, module) for module in attention_modules]
    return len(swapped)


def fuse_model(model: nn.Module) -> FusedCausalLM | None:
    """The model as one call, where its layers are fused and the whole gives the very bits of its parts."""
    fused = _model_twin(model)
    return fused if fused is not None and _equal_logits(model, fused) else None


def _model_twin(model: Any) -> FusedCausalLM | None:
    if type(model).__name__ not in _MODELS or {name for name, _ in model.named_children()} != {"model", "lm_head"}:
        return None
    backbone, head = model.model, model.lm_head
    if {name for name, _ in backbone.named_children()} != _CHILDREN or type(backbone.norm) is not FusedRMSNorm:
        return None
    if type(head) is not PackedLinear or head.kernel is None:
        return None
    if not all(type(layer) is FusedDecoderLayer for layer in backbone.layers):
        return None
    return FusedCausalLM(model, head.kernel)


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
    owner.batchgen_attention = _probe_state(attention)
    width = attention.qkv.in_features
    hidden = torch.linspace(-2.0, 2.0, _PROBE_TOKENS * width).mul(7.0).sin().view(1, _PROBE_TOKENS, width)
    angles = torch.linspace(0.0, 3.0, _PROBE_TOKENS * dim // 2).view(1, _PROBE_TOKENS, -1).repeat(1, 1, 2)
    rope = (angles.cos().bfloat16(), angles.sin().bfloat16())
    out: torch.Tensor = module(hidden_states=hidden.bfloat16(), position_embeddings=rope)
    return out


@torch.inference_mode()
def _equal_logits(model: Any, fused: FusedCausalLM) -> bool:
    """Compare some logits of the first token ids. Each layer writes before it reads, so one cache does for all."""
    state = _probe_state(fused.layers[0].parts.self_attn)
    for layer in fused.layers:
        layer.batchgen_attention = state
    assert state.step is not None
    ids, wanted = torch.arange(_PROBE_TOKENS), torch.arange(1, _PROBE_TOKENS)
    inputs = {"input_ids": ids.unsqueeze(0), "position_ids": ids.unsqueeze(0)}
    expected = model(**inputs, use_cache=False, logits_to_keep=wanted).logits[0]
    columns = (array("i", column) for column in (ids.tolist(), [0], [len(ids)], wanted.tolist()))
    return torch.equal(fused(cpu.TokenChunks(*columns), state.step.block_tables_SB), expected)


def _probe_state(attention: Any) -> LayerAttention:
    """One sequence of a few tokens in one block."""
    head_dim = attention.head_dim
    kv_heads = attention.sizes[1] // head_dim
    k_cache, v_cache = (torch.zeros(1, kv_heads, _PROBE_BLOCK, head_dim, dtype=torch.bfloat16) for _ in range(2))
    step = StepInputs(
        slots_T=torch.arange(_PROBE_TOKENS),
        block_tables_SB=torch.zeros(1, 1, dtype=torch.int32),
        query_starts_S1=torch.tensor([0, _PROBE_TOKENS], dtype=torch.int32),
        context_lens_S=torch.tensor([_PROBE_TOKENS], dtype=torch.int32),
    )
    kernels = REFERENCE._replace(store_kv=cpu.store_kv, paged_attention=cpu.paged_attention)
    return LayerAttention(kernels, k_cache, v_cache, None, step)
