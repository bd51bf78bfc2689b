"""What each attention layer keeps and sees: the sizes of its K and V, and its sliding window."""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import PretrainedConfig

from batchgen.engine.probe import AttentionCall
from batchgen.errors import ModelError

WINDOWED = "sliding_attention"
CHUNKED = "chunked_attention"
FULL = "full_attention"


class LayerSpec(NamedTuple):
    """One attention layer, in the order in which the model calls them."""

    layer_idx: int
    num_heads: int
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    window: int | None
    """A query at position p sees the keys p - window + 1 .. p; None: all of them."""


def layer_specs(calls: list[AttentionCall], config: PretrainedConfig) -> list[LayerSpec]:
    """The layers behind the calls of one forward pass; ModelError where the layer types and the calls disagree."""
    return [
        LayerSpec(
            call.layer_idx, call.num_heads, call.num_kv_heads, call.head_dim_k, call.head_dim_v, _window(call, config)
        )
        for call in calls
    ]


def layer_types(config: PretrainedConfig) -> list[str] | None:
    """The type of each layer, None where the config has only one."""
    types: list[str] | None = getattr(config, "layer_types", None)
    return types


def _window(call: AttentionCall, config: PretrainedConfig) -> int | None:
    config = getattr(call.module, "config", config)
    window = _configured_window(call.layer_idx, config)
    if call.window is not None and call.window != window:
        raise ModelError(
            f"{config.model_type}: layer {call.layer_idx} attends within a window of {call.window}, "
            f"but its config means {window}"
        )
    return window


def _configured_window(layer_idx: int, config: PretrainedConfig) -> int | None:
    types = layer_types(config)
    if types is not None:
        kind = types[layer_idx]
        if kind in (FULL, CHUNKED):
            # The context is kept within one chunk (`max_positions`), where a chunk is all there is to see.
            return None
        if kind == WINDOWED:
            return _positive(config, "sliding_window")
        raise ModelError(f"{config.model_type}: layer {layer_idx} is of type {kind}, which has no paged form")
    if getattr(config, "use_sliding_window", True) is False:
        return None
    return _positive(config, "sliding_window")


def _positive(config: PretrainedConfig, name: str) -> int | None:
    value: Any = getattr(config, name, None)
    if isinstance(value, bool) or (value is not None and not isinstance(value, int)):
        raise ModelError(f"{config.model_type}: {name} is {value!r}, which is no number of tokens")
    return value or None
