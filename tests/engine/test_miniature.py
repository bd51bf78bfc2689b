from __future__ import annotations

import pytest
import torch

from batchgen.engine.miniature import miniature_config, random_model
from tests.engine.families import ACCEPTED, config_of


@pytest.mark.parametrize("family", ACCEPTED)
def test_every_family_becomes_small(family: str) -> None:
    small = miniature_config(config_of(family))
    assert small.hidden_size == 64
    assert small.vocab_size == 128
    assert small.num_hidden_layers <= 8


def test_two_layers_of_each_kind_are_kept() -> None:
    assert miniature_config(config_of("gemma3_text")).layer_types == ["sliding_attention"] * 2 + ["full_attention"] * 2
    deepseek = miniature_config(config_of("deepseek_v3", first_k_dense_replace=5))
    assert (deepseek.num_hidden_layers, deepseek.first_k_dense_replace) == (4, 2)
    smollm3 = miniature_config(config_of("smollm3"))
    assert sorted(smollm3.no_rope_layers) == [0, 0, 1, 1]


def test_the_way_of_sharing_heads_is_kept() -> None:
    heads = [
        miniature_config(config_of("llama", num_attention_heads=16, num_key_value_heads=kv)).num_key_value_heads
        for kv in (1, 4, 16)
    ]
    assert heads == [1, 2, 4]


def test_the_same_seed_gives_the_same_model_and_leaves_torchs_seed_alone() -> None:
    small = miniature_config(config_of("llama"))
    torch.manual_seed(5)
    first = random_model(small, "eager")
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), drawn)
    second = random_model(small, "eager")
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
