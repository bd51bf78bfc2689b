from __future__ import annotations

from dataclasses import replace

import pytest

from batchgen.engine.layers import LayerSpec, layer_specs
from batchgen.engine.probe import probe_attention
from batchgen.errors import ModelError
from tests.engine.families import small_model


def specs_of(family: str) -> list[LayerSpec]:
    model = small_model(family)
    return layer_specs(probe_attention(model, "eager"), model.config)


def test_windows_follow_the_layer_types() -> None:
    assert [spec.window for spec in specs_of("gemma2")] == [8, None, 8, None]


def test_sizes_are_those_of_each_layer() -> None:
    assert specs_of("gemma4_text")[1:3] == [LayerSpec(1, 4, 2, 16, 16, 8), LayerSpec(2, 4, 2, 32, 32, None)]


def test_latent_attention_has_values_of_another_size() -> None:
    assert specs_of("deepseek_v3")[0] == LayerSpec(0, 4, 4, 24, 12, None)


def test_one_key_and_value_head_for_all_queries() -> None:
    assert specs_of("gpt_bigcode")[0].num_kv_heads == 1


def test_a_window_that_contradicts_the_config_is_refused() -> None:
    model = small_model("mistral")
    calls = [replace(call, window=9) for call in probe_attention(model, "eager")]
    with pytest.raises(ModelError, match="layer 0 attends within a window of 9, but its config means 8"):
        layer_specs(calls, model.config)


def test_an_unknown_layer_type_is_refused() -> None:
    model = small_model("gemma2")
    calls = probe_attention(model, "eager")
    calls[0].module.config.layer_types = ["spiral_attention"] * 4
    with pytest.raises(ModelError, match="layer 0 is of type spiral_attention, which has no paged form"):
        layer_specs(calls, model.config)
