from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from batchgen.engine.probe import probe_attention
from batchgen.errors import ModelError
from tests.engine.families import small_model


def test_layers_are_found_in_the_order_of_their_calls() -> None:
    model = small_model("llama")
    calls = probe_attention(model, "eager")
    assert [call.layer_idx for call in calls] == [0, 1]
    assert [call.module for call in calls] == [layer.self_attn for layer in model.model.layers]
    assert (calls[0].num_heads, calls[0].num_kv_heads, calls[0].head_dim_k) == (4, 4, 16)


def test_the_model_is_left_with_the_attention_asked_for() -> None:
    model = small_model("llama")
    probe_attention(model, "sdpa")
    assert model.config._attn_implementation == "sdpa"


def test_a_model_without_the_hook_is_refused() -> None:
    with pytest.raises(ModelError, match="bloom: no layer calls the attention function"):
        probe_attention(small_model("bloom"), "eager")


def wrap(model: PreTrainedModel, change: Callable[..., torch.Tensor]) -> None:
    """Let the first layer's attention be called through `change(forward, *args, **kwargs)`."""
    attention = model.model.layers[0].self_attn
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: change(forward, *args, **kwargs)


def test_a_module_called_twice_is_refused() -> None:
    model = small_model("llama")
    wrap(model, lambda forward, *args, **kwargs: forward(*args, **kwargs) and forward(*args, **kwargs))
    with pytest.raises(ModelError, match="one attention module is called several times"):
        probe_attention(model, "eager")


def test_a_mask_of_the_models_own_is_refused() -> None:
    model = small_model("llama")
    mask = torch.zeros(1, 1, 1, 1)
    wrap(model, lambda forward, *args, **kwargs: forward(*args, **{**kwargs, "attention_mask": mask}))
    with pytest.raises(ModelError, match="layer 0 makes an attention mask of its own"):
        probe_attention(model, "eager")


def test_an_argument_that_paged_attention_does_not_know_is_refused() -> None:
    model = small_model("llama")
    wrap(model, lambda forward, *args, **kwargs: forward(*args, **kwargs, position_bias=torch.ones(1)))
    with pytest.raises(ModelError, match="layer 0 passes position_bias to attention"):
        probe_attention(model, "eager")
