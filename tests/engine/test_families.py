"""Families of models, each run by the engine: the ids of the model's own eager generate, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from batchgen.engine.engine import Engine
from batchgen.engine.miniature import VOCAB_SIZE
from batchgen.records import Prompt
from batchgen.sampling_params import SamplingParams
from tests.engine.families import ACCEPTED, DIFFERENT, small_model

MAX_TOKENS = 24
PROMPT_LENGTHS = (3, 45, 1, 17, 30)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "block_size": 4,
    "kv_cache_memory": "2MiB",
    # Fewer than the longest prompts, so that prompts are computed in chunks beside tokens that are generated.
    "max_batch_tokens": 16,
    "max_sequences": 4,
}


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


def check(family: str, directory: Path, **settings: Any) -> None:
    """Generate both ways; texts leave the window of 8 and begin and end at different steps."""
    model = small_model(family, **settings)
    expected = {}
    for index, prompt in enumerate(prompts()):
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
        expected[index] = ids[0, len(prompt) :].tolist()
    model.save_pretrained(directory)
    engine = Engine(str(directory), **OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    completions = list(engine.generate([Prompt(token_ids=prompt) for prompt in prompts()], params))
    assert [completion.error for completion in completions] == [None] * len(PROMPT_LENGTHS)
    assert {entry.prompt_index: entry.samples[0].token_ids for entry in completions} == expected


@pytest.mark.parametrize("family", DIFFERENT)
def test_engine_generates_what_the_model_itself_does(family: str, tmp_path: Path) -> None:
    check(family, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({*ACCEPTED} - {*DIFFERENT}))
def test_engine_generates_what_each_other_model_itself_does(family: str, tmp_path: Path) -> None:
    check(family, tmp_path)
