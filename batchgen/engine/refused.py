"""Models that are refused by name, each with the reason why it would run wrong.

The self-check finds these too; a name gives the better reason, and costs nothing.
"""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

RECURRENT = "its layers keep recurrent state between tokens, and only keys and values are kept here"
HYBRID = "some of its layers keep recurrent state between tokens, and only keys and values are kept here"
OWN_ATTENTION = "its attention is code of its own that cannot be replaced, and would see the neighbours in the batch"
OWN_MASK = "its attention depends on a mask that it makes from its own weights"

REASONS = {
    "bamba": HYBRID,
    "bloom": OWN_ATTENTION,
    "doge": OWN_MASK,
    "falcon": OWN_ATTENTION,
    "falcon_h1": HYBRID,
    "falcon_mamba": RECURRENT,
    "gpt_neo": OWN_ATTENTION,
    "jamba": HYBRID,
    "mamba": RECURRENT,
    "mamba2": RECURRENT,
    "minimax": HYBRID,
    "mpt": OWN_ATTENTION,
    "nemotron_h": HYBRID,
    "olmo_hybrid": HYBRID,
    "openai-gpt": OWN_ATTENTION,
    "qwen3_5_moe_text": HYBRID,
    "qwen3_5_text": HYBRID,
    "qwen3_next": HYBRID,
    "recurrent_gemma": HYBRID,
    "rwkv": RECURRENT,
    "xglm": OWN_ATTENTION,
}
"""Model type -> reason; tests/engine/test_refused.py shows the wrong output of each."""


def refusal(config: PretrainedConfig) -> str | None:
    """Why models of this config are refused; None if its name says nothing against it."""
    method = _quantization(config)
    if method is not None:
        return f"the checkpoint is quantized by {method}; use the unquantized one, or a GGUF file of it"
    return REASONS.get(config.model_type)


def _quantization(config: PretrainedConfig) -> str | None:
    settings: Any = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    name = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    return str(getattr(name, "value", name))
