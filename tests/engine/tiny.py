"""A random two-layer llama in fp32 with a tokenizer of 32 tokens: small enough to be run against transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

from batchgen.engine.engine import Engine
from batchgen.engine.miniature import random_model
from tests.tokenizers import CONTROL, save

VOCAB_SIZE = 32
EOS = 1
"""`</s>`, which the tokenizer names."""
BLOCK_SIZE = 4
BLOCK_BYTES = 2 * 2 * 2 * BLOCK_SIZE * 8 * 4
"""K and V of two layers with two heads of eight fp32 numbers."""


def letters() -> Backend:
    """Letters a to w and #, the tokens ` a`, `ab` and `##`, a space, and four control tokens: 32 in all."""
    pieces = [*CONTROL, "<think>", "Ġ", *"abcdefghijklmnopqrstuvw", "#", "ab", "##", "Ġa"]
    backend = Backend(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[("a", "b"), ("#", "#"), ("Ġ", "a")],
        )
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


@dataclass(frozen=True)
class TinyModel:
    """One model on disk, and what transformers makes of it."""

    directory: Path
    eager: PreTrainedModel

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """transformers' own."""
        return PreTrainedTokenizerFast.from_pretrained(str(self.directory))

    def engine(self, num_blocks: int = 2048, **options: Any) -> Engine:
        """An engine with a pool of this size."""
        settings = {"device": "cpu", "dtype": "float32", "block_size": BLOCK_SIZE, "threads": 1, **options}
        return Engine(str(self.directory), kv_cache_memory=num_blocks * BLOCK_BYTES, **settings)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """fp32 [T, V] of one text, by transformers' own attention."""
        logits_1TV: torch.Tensor = self.eager(input_ids=torch.tensor([list(token_ids)])).logits
        return logits_1TV[0]


def make_tiny(
    directory: Path, *, vocab_size: int = VOCAB_SIZE, eos: int | list[int] = EOS, seed: int = 0, **generation: Any
) -> TinyModel:
    """Write a model; `generation` goes into its generation_config.json. The full vocabulary comes with a tokenizer."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=None,
    )
    model = random_model(config, "eager", seed)
    model.save_pretrained(directory)
    model.generation_config.update(eos_token_id=eos, **generation)
    model.generation_config.save_pretrained(directory)
    if vocab_size == VOCAB_SIZE:
        save(letters(), directory, bos=False)
    return TinyModel(directory, model)


def prompts_of(count: int, vocab_size: int = VOCAB_SIZE, first: int = 5) -> list[list[int]]:
    """Prompts of 3 to 12 tokens, `first` the lowest id in them."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(first, vocab_size, (3 + index % 10,), generator=generator).tolist() for index in range(count)]
