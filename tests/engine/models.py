"""Small random models on disk, with widths that end in the middle of a vector register."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from batchgen.engine.batch import Batch
from batchgen.engine.engine import Engine
from batchgen.engine.miniature import random_model
from tests.tokenizers import byte_level, save

VOCAB_SIZE = 264
"""That of the byte-level tokenizer in tests.tokenizers."""
EOS = 1
CONTEXT = 512

Kind = Literal["plain", "windowed", "capped", "experts", "learned"]

_WIDTHS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 72,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 18,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "pad_token_id": None,
}
_KINDS: dict[Kind, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "windowed": ("mistral", {"sliding_window": 8}),
    "capped": ("gemma2", {"sliding_window": 8, "query_pre_attn_scalar": 18}),
    "experts": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "learned": ("gpt2", {"n_positions": CONTEXT, "n_inner": 88}),
}
KINDS: tuple[Kind, ...] = tuple(_KINDS)


def config_of(kind: Kind) -> PretrainedConfig:
    """The config of a kind: windows of 8 tokens, softcaps, experts, learned positions."""
    family, settings = _KINDS[kind]
    config: PretrainedConfig = CONFIG_MAPPING[family](**{**_WIDTHS, **settings})
    return config


def save_model(directory: Path, kind: Kind, dtype: torch.dtype = torch.float32) -> Path:
    """Write a random model of the kind, and the byte-level tokenizer."""
    model = random_model(config_of(kind), "eager").to(dtype)
    model.save_pretrained(directory)
    save(byte_level(), directory, bos=False)
    return directory


def random_ids(length: int, salt: int = 0) -> list[int]:
    """A prompt of ordinary tokens, another one for each salt."""
    generator = torch.Generator().manual_seed(1000 + salt)
    return torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist()


def preempt_every(engine: Engine, num_steps: int) -> None:
    """Before each `num_steps`-th step of this engine, the youngest sequence loses its blocks and must be recomputed."""
    scheduler = engine._scheduler
    schedule, steps = scheduler.schedule, count(1)

    def preempting() -> Batch:
        if next(steps) % num_steps == 0 and scheduler.running:
            scheduler._roster.preempt_youngest()
        return schedule()

    scheduler.schedule = preempting  # type: ignore[method-assign]
