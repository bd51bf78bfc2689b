"""A small random model of the same build as a large one: the same layer types, every width cut down."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

WINDOW = 8
"""Sliding windows become this narrow, so that short texts leave them."""

VOCAB_SIZE = 128
_HEADS = 4
_HEAD_DIM = 16
_HIDDEN = _HEADS * _HEAD_DIM
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size": _HIDDEN,
    "n_embd": _HIDDEN,
    "d_model": _HIDDEN,
    "n_inner": 64,
    "intermediate_size": 64,
    "intermediate_size_mlp": 64,
    "ffn_dim": 64,
    "block_ff_dim": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "hidden_size_per_layer_input": 16,
    "num_attention_heads": _HEADS,
    "n_head": _HEADS,
    "n_heads": _HEADS,
    "head_dim": _HEAD_DIM,
    "global_head_dim": 2 * _HEAD_DIM,
    "v_head_dim": 12,
    "swa_head_dim": _HEAD_DIM,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "rotary_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_expand": 2,
}
_KV_HEADS = ("num_key_value_heads", "num_global_key_value_heads", "swa_num_key_value_heads", "num_kv_heads")
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_INDEX_LISTS = ("full_attn_idxs", "moe_layers", "mlp_only_layers")
_LAYERS_OF_A_KIND = 2


def miniature_config(config: PretrainedConfig) -> PretrainedConfig:
    """A config of the same class with two layers of each kind, heads of 16 and a window of 8."""
    values = config.to_dict()
    count_name = next(name for name in _LAYER_COUNTS if name in values)
    num_layers = values[count_name]
    kept = _kept_layers(values, num_layers)
    small = {key: _shrunk(key, value, num_layers, kept) for key, value in values.items()}
    small[count_name] = len(kept)
    if "word_embed_proj_dim" in small and values["word_embed_proj_dim"] == values["hidden_size"]:
        small["word_embed_proj_dim"] = _HIDDEN
    if "first_k_dense_replace" in small:
        small["first_k_dense_replace"] = sum(index < values["first_k_dense_replace"] for index in kept)
    if "num_kv_shared_layers" in small:
        small["num_kv_shared_layers"] = sum(index >= num_layers - values["num_kv_shared_layers"] for index in kept)
    if "head_dim" in small:
        # In models with latent attention it is the size of the rotary part.
        is_rotary = "qk_rope_head_dim" in small and values["head_dim"] == values["qk_rope_head_dim"]
        small["head_dim"] = small["qk_rope_head_dim"] if is_rotary else _HEAD_DIM
    heads = values.get("num_attention_heads") or values.get("n_head")
    for name in _KV_HEADS:
        if name in small:
            small[name] = {1: 1, heads: _HEADS, None: _HEADS}.get(values[name], _HEADS // 2)
    for name in ("transformers_version", "architectures", "dtype", "torch_dtype", "quantization_config", "model_type"):
        small.pop(name, None)
    return type(config)(**small)


def random_model(config: PretrainedConfig, attention_name: str, seed: int = 0) -> PreTrainedModel:
    """A model in float32 on the CPU, each weight drawn so that each layer and head matters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention_name, dtype=torch.float32
        )
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=1 / math.sqrt(parameter.shape[-1]))
                else:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval().requires_grad_(False)


def _kept_layers(values: dict[str, Any], num_layers: int) -> list[int]:
    """The first layers of each kind; layers are of one kind where all per-layer settings agree."""
    settings = [
        value
        for key, value in values.items()
        if key not in _INDEX_LISTS and isinstance(value, list) and len(value) == num_layers
    ]
    dense = values.get("first_k_dense_replace") or 0
    first_shared = num_layers - (values.get("num_kv_shared_layers") or 0)
    seen: dict[str, int] = {}
    kept = []
    for index in range(num_layers):
        own = (values.get("per_layer_config") or {}).get(f"{index:02d}")
        lists = [index in values[name] for name in _INDEX_LISTS if isinstance(values.get(name), list)]
        borders = [index < dense, index < first_shared]
        kind = repr([*(setting[index] for setting in settings), *borders, own, lists])
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= _LAYERS_OF_A_KIND:
            kept.append(index)
    return kept


def _shrunk(key: str, value: Any, num_layers: int, kept: list[int]) -> Any:
    if key in _INDEX_LISTS and isinstance(value, list):
        return [position for position, index in enumerate(kept) if index in value]
    if key == "per_layer_config" and value:
        own = {f"{position:02d}": value.get(f"{index:02d}", {}) for position, index in enumerate(kept)}
        return {index: _small_layer(settings) for index, settings in own.items() if settings}
    if isinstance(value, list) and len(value) == num_layers:
        return [value[index] for index in kept]
    if key in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
        return _small_rope(value)
    if key in _SIZES and isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return min(value, _SIZES[key])
    if key == "eos_token_id" and isinstance(value, list):
        return _SIZES[key]
    return value


def _small_layer(settings: dict[str, Any]) -> dict[str, Any]:
    # A layer with a head size of its own keeps one of its own.
    return {key: 2 * _HEAD_DIM if key == "head_dim" else value for key, value in settings.items()}


def _small_rope(rope: dict[str, Any]) -> dict[str, Any]:
    small = {}
    for key, value in rope.items():
        if isinstance(value, dict):
            small[key] = _small_rope(value)
        elif key in ("short_factor", "long_factor"):
            small[key] = value[: int(_HEAD_DIM * rope.get("partial_rotary_factor", 1.0)) // 2]
        else:
            small[key] = value
    return small
