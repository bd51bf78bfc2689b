"""What the names and numbers of a GGUF file are called in transformers, for each architecture that we convert.

Each entry was checked against transformers' own model of that name; what is not listed is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.errors import ModelError
from batchgen.gguf.reader import GGUFFile

ROPE_FACTORS = "rope_freqs.weight"
_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3_BLOCK = {
    **_BLOCK,
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class Architecture:
    """How one architecture is converted."""

    block_names: dict[str, str]
    config: Callable[[Metadata, GGUFFile], dict[str, Any]]
    permuted: frozenset[str] = frozenset()
    """Tensors whose rows llama.cpp stores with rotary pairs interleaved."""
    norm_offset: float = 0.0
    """What llama.cpp added to every norm weight."""

    def tensor_name(self, name: str) -> str | None:
        """The transformers name of a tensor, None if this architecture has no such tensor."""
        if name in _GLOBAL:
            return _GLOBAL[name]
        parts = name.split(".")
        if len(parts) != 4 or parts[0] != "blk" or parts[2] not in self.block_names or parts[3] not in _KINDS:
            return None
        return f"model.layers.{int(parts[1])}.{self.block_names[parts[2]]}.{parts[3]}"


_KINDS = ("weight", "bias")


class Metadata:
    """The keys of one architecture, with errors that name what is missing."""

    def __init__(self, gguf: GGUFFile, architecture: str) -> None:
        self.gguf = gguf
        self.architecture = architecture

    def get(self, key: str, default: Any = None) -> Any:
        value = self.gguf.metadata.get(f"{self.architecture}.{key}", default)
        # float32 values get their shortest decimal: 1e-05, not 9.999999747378752e-06, as in the original config.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelError(f"{self.gguf.path}: the key {self.architecture}.{key} is missing; convert the model anew")
        return value

    def refuse(self, what: str) -> ModelError:
        return ModelError(f"{self.gguf.path}: {self.architecture} with {what} is not supported")


def read_config(gguf: GGUFFile) -> tuple[Architecture, dict[str, Any]]:
    """The architecture and its config.json; ModelError, by name, for what cannot be converted exactly."""
    name = gguf.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{gguf.path}: GGUF architecture {name!r} is not supported, only {', '.join(ARCHITECTURES)}; "
            "use the model's safetensors directory or hub id instead"
        )
    architecture = ARCHITECTURES[name]
    keys = Metadata(gguf, name)
    if keys.get("expert_count", 0):
        raise keys.refuse(f"{keys.get('expert_count')} experts")
    return architecture, {**_common(keys, gguf), **architecture.config(keys, gguf)}


def _common(keys: Metadata, gguf: GGUFFile) -> dict[str, Any]:
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{gguf.path}: the tensor token_embd.weight is missing")
    heads = keys.need("attention.head_count")
    kv_heads = keys.get("attention.head_count_kv", heads)
    if isinstance(heads, list) or isinstance(kv_heads, list):
        raise keys.refuse("a number of heads that differs between layers")
    head_size = keys.get("attention.key_length", keys.need("embedding_length") // heads)
    if keys.get("attention.value_length", head_size) != head_size:
        raise keys.refuse("values of another size than the keys")
    if keys.get("rope.dimension_count", head_size) != head_size:
        raise keys.refuse("rotary embedding of a part of the head")
    return {
        "dtype": "bfloat16",
        "hidden_size": keys.need("embedding_length"),
        "intermediate_size": keys.need("feed_forward_length"),
        "num_hidden_layers": keys.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "rms_norm_eps": keys.need("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.need("context_length"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
    }


def _rope(keys: Metadata, gguf: GGUFFile, theta: float) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base", theta)}
    kind = keys.get("rope.scaling.type", "none")
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear"))
    if ROPE_FACTORS in gguf.tensors:
        return {**rope, **_llama3_scaling(keys, gguf, rope["rope_theta"])}
    if kind == "none" or not factor or factor == 1:
        return rope
    if kind == "linear":
        return {**rope, "rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = keys.need("rope.scaling.original_context_length")
        return {**rope, "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise keys.refuse(f"rope scaling of type {kind!r}")


def _llama3_scaling(keys: Metadata, gguf: GGUFFile, theta: float) -> dict[str, Any]:
    """Llama 3.1's parameters back from the divisor that the file stores for each frequency."""
    stored = gguf.rows(gguf.tensors[ROPE_FACTORS]).view(np.float32).ravel()
    head_size = 2 * len(stored)
    scaling = {
        "rope_type": "llama3",
        "factor": float(stored.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_size, 2) / head_size)
    if not np.allclose(_llama3_divisors(wavelengths, scaling), stored, rtol=1e-4):
        raise keys.refuse(f"the frequency factors of {ROPE_FACTORS}")
    return scaling


def _llama3_divisors(wavelengths: npt.NDArray[np.float64], scaling: dict[str, Any]) -> npt.NDArray[np.float64]:
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    smooth = np.clip((scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / factor + smooth))


def _llama(keys: Metadata, gguf: GGUFFile) -> dict[str, Any]:
    if keys.get("attention.sliding_window"):
        raise keys.refuse("a sliding window")
    biases = {name for name in _BLOCK if f"blk.0.{name}.bias" in gguf.tensors}
    attention = {"attn_q", "attn_k", "attn_v", "attn_output"}
    mlp = {"ffn_gate", "ffn_up", "ffn_down"}
    if biases - attention - mlp or biases & attention not in (set(), attention) or biases & mlp not in (set(), mlp):
        raise keys.refuse(f"biases at {', '.join(sorted(biases))} only")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": bool(biases & attention),
        "mlp_bias": bool(biases & mlp),
        "rope_parameters": _rope(keys, gguf, theta=10000.0),
    }


def _qwen2(keys: Metadata, gguf: GGUFFile) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "use_sliding_window": False,
        "rope_parameters": _rope(keys, gguf, theta=10000.0),
    }


_GEMMA3_27B_LAYERS = 62


def _gemma3(keys: Metadata, gguf: GGUFFile) -> dict[str, Any]:
    num_layers, heads = keys.need("block_count"), keys.need("attention.head_count")
    head_size = keys.need("attention.key_length")
    pattern = keys.get("attention.sliding_window_pattern", 6)
    if isinstance(pattern, list):
        sliding = [bool(value) for value in pattern]
    else:
        sliding = [bool((layer + 1) % pattern) for layer in range(num_layers)]
    # The file does not store the score's scale: the 27B model alone takes it from hidden size / heads.
    scalar = keys.need("embedding_length") // heads if num_layers == _GEMMA3_27B_LAYERS else head_size
    local_theta = keys.get("rope.freq_base_swa", keys.get("rope.local.freq_base", 10000.0))
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": keys.need("attention.sliding_window"),
        "layer_types": ["sliding_attention" if local else "full_attention" for local in sliding],
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
        "attn_logit_softcapping": keys.get("attn_logit_softcapping"),
        "rope_parameters": {
            "full_attention": _rope(keys, gguf, theta=1000000.0),
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        },
    }


ARCHITECTURES = {
    "llama": Architecture(_BLOCK, _llama, permuted=frozenset({"attn_q", "attn_k"})),
    "qwen2": Architecture(_BLOCK, _qwen2),
    "gemma3": Architecture(_GEMMA3_BLOCK, _gemma3, norm_offset=1.0),
}
