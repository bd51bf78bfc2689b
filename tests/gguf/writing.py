"""Small GGUF files for tests, written as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from transformers import PreTrainedModel

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA3_NAMES = {
    **NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
TOKENS = ["<unk>", "<s>", "</s>", *(chr(ord("a") + index) for index in range(26)), "ab", "Ġ"]
TYPES = [3, 3, 3, *[1] * 28]


def config_keys(architecture: str, config: Any) -> dict[str, Any]:
    """The metadata of a transformers config."""
    rope = config.rope_parameters
    theta = rope["rope_theta"] if "rope_theta" in rope else rope["full_attention"]["rope_theta"]
    keys = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": theta,
    }
    return {f"{architecture}.{key}": value for key, value in keys.items()}


def tokenizer_keys() -> dict[str, Any]:
    """A byte-level tokenizer of 31 tokens and one merge."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def weights_of(model: PreTrainedModel, architecture: str) -> dict[str, npt.NDArray[np.float32]]:
    """A model's weights under llama.cpp's names, rotary pairs interleaved and norms shifted as it does."""
    config = model.config
    names = GEMMA3_NAMES if architecture == "gemma3" else NAMES
    weights = {}
    for full_name, tensor in model.state_dict().items():
        if full_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, kind = full_name.rsplit(".", 1)
        values = tensor.to(torch.float32).numpy()
        if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
            split = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = split.swapaxes(1, 2).reshape(values.shape)
        if architecture == "gemma3" and stem.endswith("norm"):
            values = values + 1
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            weights[f"blk.{layer}.{names[part]}.{kind}"] = np.ascontiguousarray(values)
        else:
            weights[f"{names[stem]}.{kind}"] = values
    return weights


def write_gguf(
    path: Path,
    architecture: str,
    metadata: dict[str, Any],
    weights: dict[str, npt.NDArray[Any]],
    matrix_type: GGMLQuantizationType = GGMLQuantizationType.F32,
    raw: dict[str, tuple[npt.NDArray[np.uint8], GGMLQuantizationType]] | None = None,
) -> Path:
    """Write a file; matrices as `matrix_type`, vectors as float32, `raw` ones (bytes [rows, bytes]) as they are."""
    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    for name, values in weights.items():
        kind = matrix_type if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    for name, (stored, kind) in (raw or {}).items():
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
