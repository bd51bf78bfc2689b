"""Blocks of a model with a sliding window: after each step each has the owners that the tables name."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchgen.engine.engine import Engine
from batchgen.records import Prompt
from batchgen.sampling_params import SamplingParams
from tests.engine.models import preempt_every, random_ids, save_model
from tests.engine.running import run

BLOCK_BYTES = 2 * 2 * 4 * 2 * 18 * 4
"""K and V of two layers: four tokens of two heads of 18 fp32 numbers."""


@pytest.mark.case(36)
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_rows_far_longer_than_the_window_never_own_one_block_by_mistake(tmp_path: Path, prefix_caching: bool) -> None:
    directory = str(save_model(tmp_path / "model", "windowed"))
    common = random_ids(30, salt=99)
    prompts = [Prompt(token_ids=[*common, *random_ids(70, salt=row)], row=row) for row in range(4)]
    params = [SamplingParams(n=2, max_tokens=12, seed=1, ignore_eos=True)] * len(prompts)

    def engine(**options: int) -> Engine:
        options = {"max_batch_tokens": 64, "prefix_caching": prefix_caching, **options}
        return Engine(directory, dtype="float32", device="cpu", block_size=4, **options)

    # Room for two of the four rows: blocks of 4, rows of 112 tokens, windows of 8.
    small = engine(kv_cache_memory=70 * BLOCK_BYTES)
    assert small.metrics.num_blocks == 70
    preempt_every(small, 5)
    found = run(small, prompts, params)
    assert small.metrics.num_preemptions > 0
    for completion, prompt, one in zip(found, prompts, params, strict=True):
        (alone,) = run(engine(max_sequences=2), [prompt], [one])
        assert [sample.token_ids for sample in completion.samples] == [sample.token_ids for sample in alone.samples]
