"""Load a model of transformers so that its attention is ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging as transformers_logging

from batchgen.engine.attention import ATTENTION_NAME
from batchgen.engine.layers import LayerSpec, layer_specs
from batchgen.engine.positions import freeze_rope, max_positions
from batchgen.engine.probe import probe_attention
from batchgen.engine.self_check import check_architecture
from batchgen.errors import ModelError
from batchgen.tokenizer import Tokenizer

AUTO = "auto"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NO_SETTINGS = {
    *("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id"),
    *("_from_model_config", "cache_implementation", "return_dict_in_generate", "transformers_version", "use_cache"),
}
"""Entries of generation_config.json that are used, or say nothing about which tokens are drawn."""
_STORED_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device, ready to be run over flattened tokens."""

    model: PreTrainedModel
    config: PretrainedConfig
    """Of the language model; in a model of several parts, the part for text."""
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    tokenizer: Tokenizer | None
    """None where the directory has none: then prompts are token ids, and there is no text."""
    max_model_len: int
    """The most tokens of prompt and completion together."""
    eos_token_ids: frozenset[int]
    """The union of what generation_config, config and tokenizer name."""
    layers: list[LayerSpec]
    attention_modules: list[torch.nn.Module]
    """The module of each layer; the engine attaches its state to it as `batchgen_attention`."""
    unused_settings: dict[str, Any] = field(default_factory=dict)
    """What else generation_config.json says about sampling: nothing but its eos ids is taken unasked."""


def load_model(
    directory: Path,
    dtype: str | torch.dtype = AUTO,
    device: torch.device | str = "cpu",
    max_model_len: int | str = AUTO,
    attention_name: str = ATTENTION_NAME,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load config and safetensors, and set attention to the registered function `attention_name`.

    `dtype` auto is what the checkpoint says, `max_model_len` auto what the model is made for. Raises ModelError, by
    name and reason, for a model that is damaged, or that would run wrong this way.
    """
    config = _read_config(directory, trust_remote_code)
    text_config = config.get_text_config(decoder=True)
    length = max_positions(text_config, None if max_model_len == AUTO else int(max_model_len))
    check_architecture(config)
    _refuse_quantized(directory)
    resolved = resolve_dtype(directory, config, dtype)
    model = _load_weights(directory, config, resolved, attention_name, trust_remote_code).to(device)
    freeze_rope(model, length)
    calls = probe_attention(model, attention_name)
    generation_config = _read_json(directory / "generation_config.json")
    tokenizer = Tokenizer.from_directory(directory)
    vocab_size = model.get_input_embeddings().weight.shape[0]
    return LoadedModel(
        model=model,
        config=text_config,
        device=torch.device(device),
        dtype=resolved,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        max_model_len=length,
        eos_token_ids=_eos_token_ids(config, text_config, generation_config, tokenizer, vocab_size),
        layers=layer_specs(calls, text_config),
        attention_modules=[call.module for call in calls],
        unused_settings=_unused_settings(generation_config),
    )


def resolve_dtype(directory: Path, config: PretrainedConfig, dtype: str | torch.dtype) -> torch.dtype:
    """The type to compute in; for `auto` that of config.json, or else of the first stored weight."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype != AUTO:
        return _DTYPES[dtype]
    text_config = config.get_text_config(decoder=True)
    for named in (getattr(text_config, "dtype", None), getattr(config, "dtype", None)):
        if isinstance(named, torch.dtype):
            return named
    return _stored_dtype(directory) or torch.float32


def _stored_dtype(directory: Path) -> torch.dtype | None:
    try:
        for file in sorted(directory.glob("*.safetensors")):
            with safe_open(file, "pt") as weights:
                for name in weights.keys():  # noqa: SIM118 - no mapping, it only has keys()
                    stored = weights.get_slice(name).get_dtype()
                    if stored in _STORED_DTYPES:
                        return _STORED_DTYPES[stored]
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{directory}: the weights cannot be read ({error}); fetch them again") from error
    return None


def _refuse_quantized(directory: Path) -> None:
    """Checkpoints of older tools say it in a file of their own, not in config.json."""
    for name in ("quantize_config.json", "quant_config.json", "hf_quant_config.json"):
        if (directory / name).exists():
            raise ModelError(
                f"{directory}: the checkpoint is quantized, as {name} says; "
                "use the unquantized one, or a GGUF file of it"
            )


def _read_config(directory: Path, trust_remote_code: bool) -> PretrainedConfig:
    contents = _read_json(directory / "config.json")
    kind = contents.get("model_type", "(no model_type)")
    if "auto_map" in contents and not trust_remote_code and kind not in CONFIG_MAPPING:
        raise ModelError(f"{directory}: {kind} needs Python code from its own repository, which is not run unasked")
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, TypeError, OSError, StrictDataclassError) as error:
        raise ModelError(f"{directory}: config.json ({kind}) cannot be read: {error}") from error


def _load_weights(
    directory: Path, config: PretrainedConfig, dtype: torch.dtype, attention_name: str, trust_remote_code: bool
) -> PreTrainedModel:
    try:
        with _no_progress_bar():
            model, info = AutoModelForCausalLM.from_pretrained(
                directory,
                config=config,
                dtype=dtype,
                attn_implementation=attention_name,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                trust_remote_code=trust_remote_code,
            )
    except (ValueError, KeyError, TypeError, OSError, ImportError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{directory}: the weights of {config.model_type} cannot be loaded: {error}") from error
    # transformers would fill what is missing with random numbers.
    absent = sorted({*info["missing_keys"], *(str(entry) for entry in info["mismatched_keys"])})
    if absent:
        raise ModelError(
            f"{directory}: {len(absent)} weights are missing or of another shape, the first is {absent[0]}; "
            "fetch the checkpoint again"
        )
    loaded: PreTrainedModel = model.eval().requires_grad_(False)
    return loaded


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """The job shows its own progress; loading would draw over it."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _eos_token_ids(
    config: PretrainedConfig,
    text_config: PretrainedConfig,
    generation_config: dict[str, Any],
    tokenizer: Tokenizer | None,
    vocab_size: int,
) -> frozenset[int]:
    ids: set[int] = set()
    # A token that tokenizer_config.json names and tokenizer.json lacks gets an id past those of the model.
    if tokenizer is not None and tokenizer.eos_token_id is not None and tokenizer.eos_token_id < vocab_size:
        ids.add(tokenizer.eos_token_id)
    named = (generation_config.get("eos_token_id"), config_eos(config), config_eos(text_config))
    for value in named:
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(ids)


def _unused_settings(generation_config: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in sorted(generation_config.items())
        if value is not None and name not in _NO_SETTINGS and not name.startswith("output_")
    }


def config_eos(config: PretrainedConfig) -> int | list[int] | None:
    """The eos id or ids of a config."""
    value: int | list[int] | None = getattr(config, "eos_token_id", None)
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path}: not JSON ({error}); fetch it again") from error
    return contents if isinstance(contents, dict) else {}
