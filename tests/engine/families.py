"""The model families that the tests run: how to build a small one of each."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from batchgen.engine.miniature import VOCAB_SIZE, miniature_config, random_model

# fmt: off
ACCEPTED = (
    "llama", "qwen2", "qwen3", "mistral", "ministral3", "gemma", "gemma2", "gemma3_text", "gemma4_text", "phi",
    "phi3", "gpt2", "gpt_neox", "gptj", "codegen", "gpt_bigcode", "opt", "biogpt", "olmo2", "olmo3", "olmoe",
    "granite", "granitemoe", "stablelm", "nemotron", "starcoder2", "smollm3", "cohere", "cohere2", "mixtral",
    "qwen3_moe", "gpt_oss", "mimo_v2_flash", "deepseek_v3", "glm4", "glm4_moe", "exaone4", "ernie4_5", "seed_oss",
    "hunyuan_v1_dense", "apertus", "helium", "arcee", "bitnet", "nanochat", "persimmon", "lfm2", "llama4_text",
)
# fmt: on
"""transformers' model types of the families that must run."""

DIFFERENT = ("llama", "gemma3_text", "gpt2", "gpt_neox", "opt", "cohere2", "mixtral", "gpt_oss", "deepseek_v3", "phi3")
"""Ten of different kinds: grouped heads, windows, learned positions, parallel blocks, experts, sinks, MLA."""

_PLAIN: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_STATE = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
SETTINGS: dict[str, dict[str, Any]] = {
    "bamba": {**_PLAIN, **_MAMBA, "num_hidden_layers": 4, "attn_layer_indices": [1, 3], "mamba_n_groups": 1},
    "bloom": {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    "falcon": {**_PLAIN, "alibi": False, "multi_query": False},
    "falcon_h1": {**_PLAIN, **_MAMBA, "mamba_d_ssm": 128, "head_dim": 16},
    "falcon_mamba": _STATE,
    "gpt_neo": {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
    },
    "granitemoehybrid": {
        **_PLAIN,
        **_MAMBA,
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "attention"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
    },
    "jamba": {
        **_PLAIN,
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
        "num_experts": 4,
        "mamba_dt_rank": 8,
    },
    "mamba": _STATE,
    "mamba2": {**_STATE, "num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16},
    "mpt": {"vocab_size": VOCAB_SIZE, "d_model": 64, "n_layers": 2, "n_heads": 4},
    "nemotron_h": {**_PLAIN, "num_hidden_layers": None},
    "recurrent_gemma": {**_PLAIN, "num_hidden_layers": 3, "lru_width": 64, "head_dim": 16, "attention_window_size": 8},
    "rwkv": {**_STATE, "context_length": 64},
    "xglm": {"vocab_size": VOCAB_SIZE, "d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64},
}
"""Small settings where cutting down the default config is not enough."""


def config_of(family: str, **settings: Any) -> PretrainedConfig:
    """The default config of a family, for text alone, with `settings` instead of the defaults."""
    config: PretrainedConfig = CONFIG_MAPPING[family](**settings).get_text_config(decoder=True)
    return config


def small_config(family: str, **settings: Any) -> PretrainedConfig:
    """A config small enough to run in a test."""
    if family in SETTINGS:
        return config_of(family, **SETTINGS[family])
    return miniature_config(config_of(family, **settings))


def small_model(family: str, **settings: Any) -> PreTrainedModel:
    """A random model of that config, in float32, with transformers' eager attention."""
    return random_model(small_config(family, **settings), "eager")
