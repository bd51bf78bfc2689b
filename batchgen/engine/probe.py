"""What a model's attention layers look like: found by running one token through it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from batchgen.errors import ModelError

PROBE_NAME = "batchgen_probe"


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention function during a forward pass."""

    module: torch.nn.Module
    layer_idx: int
    num_heads: int
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    window: int | None
    """The keyword argument `sliding_window`."""
    masked: bool
    """Whether the model made a mask of its own, which paged attention would ignore."""
    unknown: tuple[str, ...]
    """Keyword arguments with a value that paged attention does not know: position biases and the like."""


_HARMLESS = {
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "dropout",
    "head_mask",
    "is_causal",
    "layer_idx",
    "max_length_k",
    "max_length_q",
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "s_aux",
    "scaling",
    "sliding_window",
    "softcap",
    "use_cache",
}


class _Recorder:
    """Stands in for the attention function and notes what it is called with."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        unknown = {name for name, given in kwargs.items() if name not in _HARMLESS and given not in (None, False)}
        layer_idx = getattr(module, "layer_idx", None)
        self.calls.append(
            AttentionCall(
                module=module,
                layer_idx=len(self.calls) if layer_idx is None else layer_idx,
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_dim_k=key.shape[3],
                head_dim_v=value.shape[3],
                window=kwargs.get("sliding_window"),
                masked=attention_mask is not None,
                unknown=tuple(sorted(unknown)),
            )
        )
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


def probe_attention(model: PreTrainedModel, attention_name: str) -> list[AttentionCall]:
    """The attention calls of one forward pass over one token, in their order.

    Leaves the model set to `attention_name`. Raises ModelError where a model does not let attention be set, makes
    a mask of its own, calls a module twice, or passes what we do not know.
    """
    calls = attention_calls(model, attention_name)
    kind = model.config.model_type
    if not calls:
        raise ModelError(f"{kind}: no layer calls the attention function that transformers lets us set")
    if len({id(call.module) for call in calls}) != len(calls):
        raise ModelError(f"{kind}: one attention module is called several times in a forward pass")
    for call in calls:
        if call.masked:
            raise ModelError(f"{kind}: layer {call.layer_idx} makes an attention mask of its own")
        if call.unknown:
            raise ModelError(f"{kind}: layer {call.layer_idx} passes {', '.join(call.unknown)} to attention")
    return calls


def attention_calls(model: PreTrainedModel, attention_name: str) -> list[AttentionCall]:
    """As `probe_attention`, with nothing checked."""
    recorder = _Recorder()
    AttentionInterface.register(PROBE_NAME, recorder)
    model.set_attn_implementation(PROBE_NAME)
    try:
        with torch.inference_mode():
            token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
            model(input_ids=token, position_ids=token, use_cache=False)
    finally:
        model.set_attn_implementation(attention_name)
    return recorder.calls
