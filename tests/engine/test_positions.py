from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from batchgen.engine.miniature import random_model
from batchgen.engine.positions import freeze_rope, max_positions
from batchgen.errors import ModelError
from tests.engine.families import config_of, small_config

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 48,
    "long_factor": [4.0] * 48,
    "original_max_position_embeddings": 16,
}
SCALED: dict[str, dict[str, Any]] = {
    "dynamic": {"family": "llama", "rope_parameters": DYNAMIC, "max_position_embeddings": 16},
    "longrope": {
        "family": "phi3",
        "rope_parameters": LONGROPE,
        "max_position_embeddings": 64,
        "original_max_position_embeddings": 16,
    },
}


def model_of(kind: str) -> PreTrainedModel:
    return random_model(small_config(**SCALED[kind]), "eager")


def last_logits(model: PreTrainedModel, length: int) -> torch.Tensor:
    ids = torch.randint(3, 128, (1, 64), generator=torch.Generator().manual_seed(0))[:, :length]
    with torch.inference_mode():
        logits: torch.Tensor = model(ids, use_cache=False).logits[0, -1]
    return logits


@pytest.mark.parametrize("kind", SCALED)
def test_unfrozen_rope_depends_on_the_longest_text(kind: str) -> None:
    """What freezing prevents: the frequencies after a long text are not those after a short one."""
    model = model_of(kind)
    rotary = model.model.rotary_emb
    positions = torch.arange(8)[None]
    short = rotary(torch.zeros(1), positions)[0].clone()
    beside_a_long_one = rotary(torch.zeros(1), torch.cat([positions, torch.tensor([[40]])], dim=1))[0][:, :8]
    assert not torch.allclose(short, beside_a_long_one)


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("length", [5, 15])
def test_up_to_the_original_length_nothing_changes(kind: str, length: int) -> None:
    own = last_logits(model_of(kind), length)
    model = model_of(kind)
    freeze_rope(model, 16)
    last_logits(model, 40)
    torch.testing.assert_close(last_logits(model, length), own)


@pytest.mark.parametrize("kind", SCALED)
def test_beyond_it_every_text_has_the_longest_ones_frequencies(kind: str) -> None:
    own = last_logits(model_of(kind), 40)
    model = model_of(kind)
    freeze_rope(model, 40)
    torch.testing.assert_close(last_logits(model, 40), own)
    before = last_logits(model, 5)
    last_logits(model, 64)
    torch.testing.assert_close(last_logits(model, 5), before, rtol=0, atol=0)
    assert not torch.allclose(before, last_logits(model_of(kind), 5))


def test_other_rope_is_left_alone() -> None:
    model = random_model(small_config("llama"), "eager")
    freeze_rope(model, 40)
    assert model.model.rotary_emb.rope_type == "default"


def test_length_is_what_the_model_is_made_for() -> None:
    assert max_positions(config_of("llama", max_position_embeddings=2048), None) == 2048
    assert max_positions(config_of("gpt2"), None) == 1024
    assert max_positions(config_of("llama", max_position_embeddings=2048), 100) == 100


def test_asking_for_more_than_the_model_has_is_refused() -> None:
    with pytest.raises(ModelError, match=r"model\.max_model_len is 5000, but llama has 2048 positions"):
        max_positions(config_of("llama", max_position_embeddings=2048), 5000)


def test_chunked_attention_keeps_to_its_chunk() -> None:
    config = config_of("llama4_text", attention_chunk_size=128)
    assert max_positions(config, None) == 128
    with pytest.raises(ModelError, match="has 128 positions"):
        max_positions(config, 129)


def test_rope_by_batch_defaults_to_the_original_length() -> None:
    config = small_config(**SCALED["longrope"])
    assert max_positions(config, None) == 16
    assert max_positions(config, 64) == 64
