"""How long a text may be, and rotary embeddings that would otherwise depend on the longest text of a batch.

RoPE of the types `dynamic` and `longrope` picks its frequencies by the largest position in the batch. Flattened with
a long neighbour, a short row would get the long row's frequencies. So they are frozen at load, by the longest text
that the engine takes: up to the original context every row is what transformers computes for it alone, and beyond
that every row has the frequencies of the longest one.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from batchgen.engine.layers import CHUNKED, layer_types
from batchgen.errors import ModelError

_BY_BATCH = ("dynamic", "longrope")
_UNLIMITED = 1 << 20
_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def max_positions(config: PretrainedConfig, asked: int | None) -> int:
    """Tokens of prompt and completion together: what was `asked` for, else all that the model is made for.

    Raises ModelError if more is asked than the model has positions for.
    """
    limit = next((value for name in _NAMES if isinstance(value := getattr(config, name, None), int)), _UNLIMITED)
    if CHUNKED in (layer_types(config) or ()):
        limit = min(limit, config.attention_chunk_size)
    if asked is None:
        return min([limit, *(_original_length(rope, config) for rope in _ropes(config) if _is_by_batch(rope))])
    if asked > limit:
        raise ModelError(f"model.max_model_len is {asked}, but {config.model_type} has {limit} positions; lower it")
    return asked


def freeze_rope(model: PreTrainedModel, max_model_len: int) -> None:
    """Make every rotary embedding of the model independent of the batch; see the module."""
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, str) and _names_batch(rope_type):
            _freeze(module, rope_type, max_model_len)
        elif isinstance(rope_type, dict) and any(_names_batch(kind) for kind in rope_type.values()):
            raise ModelError(f"{model.config.model_type}: rope of type {rope_type} differs by layer and by batch")


def _freeze(module: Any, rope_type: str, max_model_len: int) -> None:
    rope = module.config.rope_parameters
    if max_model_len > _original_length(rope, module.config):
        compute = ROPE_INIT_FUNCTIONS[rope_type]
        inv_freq, module.attention_scaling = compute(module.config, module.inv_freq.device, seq_len=max_model_len)
    else:
        inv_freq = module.original_inv_freq.to(module.inv_freq.device)
    module.register_buffer("inv_freq", inv_freq.to(torch.float32), persistent=False)
    module.rope_type = "frozen"


def _ropes(config: PretrainedConfig) -> list[dict[str, Any]]:
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        return [parameters]
    return [value for value in parameters.values() if isinstance(value, dict)]


def _is_by_batch(rope: dict[str, Any]) -> bool:
    return _names_batch(rope.get("rope_type", "default"))


def _names_batch(rope_type: str) -> bool:
    return any(name in rope_type for name in _BY_BATCH)


def _original_length(rope: dict[str, Any], config: PretrainedConfig) -> int:
    length: int = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    return length
