from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf.quants
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from batchgen.errors import ModelError
from batchgen.gguf.convert import convert_gguf
from tests.gguf.writing import TOKENS, config_keys, tokenizer_keys, weights_of, write_gguf

SIZES: dict[str, Any] = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DEQUANTIZED = sorted([*gguf.quants._type_traits, GGMLQuantizationType.F32, GGMLQuantizationType.F16])


def tiny(architecture: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A random model, all of whose weights matter, and the metadata that it has beyond the common keys."""
    torch.manual_seed(0)
    extra: dict[str, Any] = {}
    model: PreTrainedModel
    if architecture == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=2, tie_word_embeddings=False))
    elif architecture == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, num_hidden_layers=2, tie_word_embeddings=True))
    else:
        extra = {"attention.key_length": 32, "attention.value_length": 32, "attention.sliding_window": 8}
        config = Gemma3TextConfig(**SIZES, num_hidden_layers=6, head_dim=32, query_pre_attn_scalar=32, sliding_window=8)
        model = Gemma3ForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval(), {f"{architecture}.{key}": value for key, value in extra.items()}


def metadata_of(architecture: str, model: PreTrainedModel, extra: dict[str, Any]) -> dict[str, Any]:
    return {**config_keys(architecture, model.config), **extra, **tokenizer_keys()}


def converted(tmp_path: Path, file: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    convert_gguf(file, directory)
    return directory


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3"])
def test_converted_model_computes_what_the_original_does(tmp_path: Path, architecture: str) -> None:
    model, extra = tiny(architecture)
    metadata = metadata_of(architecture, model, extra)
    directory = converted(
        tmp_path, write_gguf(tmp_path / "m.gguf", architecture, metadata, weights_of(model, architecture))
    )
    again = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    assert type(again) is type(model)
    # Longer than the window, so that a wrong pattern of windows shows.
    ids = torch.randint(0, len(TOKENS), (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_auto_dtype_is_bfloat16_and_float32_loses_nothing(tmp_path: Path) -> None:
    model, extra = tiny("llama")
    weights = weights_of(model, "llama")
    file = write_gguf(
        tmp_path / "m.gguf", "llama", metadata_of("llama", model, extra), weights, GGMLQuantizationType.Q8_0
    )
    directory = converted(tmp_path, file)
    assert json.loads((directory / "config.json").read_text())["dtype"] == "bfloat16"
    stored = load_file(directory / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    exact = gguf.quants.dequantize(
        gguf.quants.quantize(weights["blk.0.ffn_up.weight"], GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0
    )
    assert stored.dtype == torch.float32
    np.testing.assert_array_equal(stored.numpy(), exact)


@pytest.mark.parametrize("kind", DEQUANTIZED, ids=lambda kind: kind.name)
def test_every_type_that_gguf_dequantizes_is_converted(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    """Row by row and, for llama's queries, in another order of rows: the values are those of the package."""
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    columns, heads = max(block_elements, 64), 4
    stored = np.random.default_rng(0).integers(0, 60, (64, columns // block_elements * block_bytes), np.uint8)
    model, _ = tiny("llama")
    metadata = metadata_of("llama", model, {})
    metadata |= {"llama.embedding_length": columns, "llama.attention.head_count": heads}
    metadata |= {"llama.attention.key_length": 16, "llama.attention.value_length": 16}
    raw = {"blk.0.attn_q.weight": (stored, kind), "blk.0.ffn_gate.weight": (stored, kind)}
    weights = {"token_embd.weight": np.zeros((len(TOKENS), columns), np.float32)}
    directory = converted(tmp_path, write_gguf(tmp_path / "m.gguf", "llama", metadata, weights, raw=raw))
    tensors = load_file(directory / "model.safetensors")
    exact = torch.from_numpy(gguf.quants.dequantize(stored, kind).copy()).reshape(64, columns)
    torch.testing.assert_close(
        tensors["model.layers.0.mlp.gate_proj.weight"].float(), exact, rtol=0, atol=0, equal_nan=True
    )
    halves = exact.reshape(heads, 8, 2, columns).transpose(1, 2).reshape(64, columns)
    torch.testing.assert_close(
        tensors["model.layers.0.self_attn.q_proj.weight"].float(), halves, rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("kind", [GGMLQuantizationType.I32, GGMLQuantizationType.Q8_K, GGMLQuantizationType.F64])
def test_other_tensor_types_are_refused_by_name(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    model, extra = tiny("llama")
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    stored = np.zeros((1, 256 // block_elements * block_bytes), np.uint8)
    file = write_gguf(
        tmp_path / "m.gguf",
        "llama",
        metadata_of("llama", model, extra),
        weights_of(model, "llama"),
        raw={"blk.7.ffn_up.weight": (stored, kind)},
    )
    with pytest.raises(ModelError, match=f"ffn_up.weight is of tensor type {kind.name}"):
        converted(tmp_path, file)


def test_a_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    model, extra = tiny("llama")
    weights = weights_of(model, "llama") | {"blk.0.ffn_gate_inp.weight": np.zeros((4, 64), np.float32)}
    file = write_gguf(tmp_path / "m.gguf", "llama", metadata_of("llama", model, extra), weights)
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_gate_inp\.weight has no place in the architecture llama"):
        converted(tmp_path, file)


def test_eos_ids_come_from_the_file(tmp_path: Path) -> None:
    model, extra = tiny("llama")
    metadata = metadata_of("llama", model, extra) | {"tokenizer.ggml.eot_token_id": 5}
    directory = converted(tmp_path, write_gguf(tmp_path / "m.gguf", "llama", metadata, weights_of(model, "llama")))
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == [2, 5]


@pytest.mark.parametrize("key", ["tokenizer.ggml.merges", "tokenizer.ggml.tokens", "llama.attention.head_count"])
def test_metadata_of_another_type_is_refused(tmp_path: Path, key: str) -> None:
    model, extra = tiny("llama")
    metadata = metadata_of("llama", model, extra) | {key: [7]}
    with pytest.raises(ModelError, match=r"m\.gguf"):
        converted(tmp_path, write_gguf(tmp_path / "m.gguf", "llama", metadata, weights_of(model, "llama")))
