from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from batchgen.errors import ModelError
from batchgen.gguf.architectures import read_config
from batchgen.gguf.reader import read_gguf
from tests.gguf.writing import write_gguf

LLAMA = {
    "llama.context_length": 1024,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 500000.0,
}
EMBEDDING = {"token_embd.weight": np.zeros((8, 64), np.float32)}


def config_of(tmp_path: Path, metadata: dict[str, Any], weights: dict[str, Any] | None = None) -> dict[str, Any]:
    file = write_gguf(tmp_path / "m.gguf", "llama", metadata, EMBEDDING | (weights or {}))
    return read_config(read_gguf(file))[1]


def test_float_keys_get_their_shortest_decimal(tmp_path: Path) -> None:
    assert config_of(tmp_path, LLAMA)["rms_norm_eps"] == 1e-5


def test_heads_of_keys_default_to_all_heads(tmp_path: Path) -> None:
    config = config_of(tmp_path, LLAMA)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 4, 16)


def test_llama3_rope_factors_become_the_scaling_they_came_from(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    original = LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=scaling)
    plain = 1 / 500000.0 ** (np.arange(0, 128, 2) / 128)
    factors = (plain / LlamaRotaryEmbedding(original).inv_freq.numpy()).astype(np.float32)
    metadata = LLAMA | {"llama.embedding_length": 512}
    config = config_of(tmp_path, metadata, {"rope_freqs.weight": factors})
    again = LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=config["rope_parameters"])
    torch.testing.assert_close(LlamaRotaryEmbedding(again).inv_freq, LlamaRotaryEmbedding(original).inv_freq)


def test_rope_factors_of_another_kind_are_refused(tmp_path: Path) -> None:
    factors = np.linspace(1, 9, 8, dtype=np.float32)
    with pytest.raises(ModelError, match=r"llama with the frequency factors of rope_freqs\.weight is not supported"):
        config_of(tmp_path, LLAMA, {"rope_freqs.weight": factors})


def test_yarn_and_linear_scaling_are_kept(tmp_path: Path) -> None:
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 256}
    config = config_of(tmp_path, LLAMA | {f"llama.{key}": value for key, value in yarn.items()})
    assert config["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 500000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 8.0}
    assert config_of(tmp_path, LLAMA | linear)["rope_parameters"]["rope_type"] == "linear"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"llama.expert_count": 8}, "llama with 8 experts"),
        ({"llama.rope.dimension_count": 8}, "rotary embedding of a part of the head"),
        ({"llama.attention.value_length": 8}, "values of another size"),
        ({"llama.attention.sliding_window": 8}, "a sliding window"),
        ({"llama.attention.head_count_kv": [4, 2]}, "a number of heads that differs"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "rope scaling of type 'longrope'"),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config_of(tmp_path, LLAMA | keys)


def test_biases_at_some_places_only_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="biases at attn_q only"):
        config_of(tmp_path, LLAMA, {"blk.0.attn_q.bias": np.zeros(64, np.float32)})


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    metadata = {key: value for key, value in LLAMA.items() if not key.endswith("block_count")}
    with pytest.raises(ModelError, match=r"the key llama\.block_count is missing"):
        config_of(tmp_path, metadata)


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", "mamba", {}, EMBEDDING)
    with pytest.raises(ModelError, match="'mamba' is not supported, only llama, qwen2, gemma3"):
        read_config(read_gguf(file))
