"""Thousands of random requests on a small pool, each equal to its solo run bit for bit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from batchgen.engine.engine import Engine
from batchgen.records import Prompt, Sample
from batchgen.sampling_params import SamplingParams
from tests.engine.models import random_ids as ids_of
from tests.engine.models import save_model


def requests(count: int) -> list[tuple[Prompt, SamplingParams]]:
    """Prompts of every length, a third of them with a common prefix, each with controls of its own."""
    chance = random.Random(7)
    prefix = ids_of(48, salt=99)
    made = []
    for row in range(count):
        ids = ids_of(chance.randrange(1, 60), salt=row)
        if row % 3 == 0:
            ids = prefix[: chance.randrange(16, 48)] + ids[:12]
        params = SamplingParams(
            n=chance.choice([1, 1, 1, 2, 3]),
            temperature=chance.choice([0.0, 0.7, 1.0]),
            top_p=chance.choice([1.0, 0.9]),
            repetition_penalty=chance.choice([1.0, 1.2]),
            max_tokens=chance.randrange(1, 24),
            seed=row,
        )
        made.append((Prompt(token_ids=ids, row=row), params))
    return made


def texts(samples: list[Sample]) -> list[tuple[list[int], float]]:
    return [(sample.token_ids, sample.cumulative_logprob) for sample in samples]


def soak(directory: Path, count: int, num_solo: int) -> None:
    made = requests(count)
    engine = Engine(str(directory), dtype="float32", device="cpu", block_size=8, max_sequences=24, max_batch_tokens=64)
    pool = engine._scheduler.pool
    # Blocks that nobody gives back leave a pool that is full most of the time.
    kept = [pool.allocate() for _ in range(pool.num_blocks - 40)]
    found: dict[int, list[tuple[list[int], float]]] = {}
    for completion in engine.generate([prompt for prompt, _ in made], [params for _, params in made]):
        assert completion.error is None
        found[completion.prompt_index] = texts(completion.samples)
    assert engine.metrics.num_preemptions > count // 20
    assert pool.num_free + len(kept) == pool.num_blocks
    for index in random.Random(1).sample(range(count), num_solo):
        solo = Engine(str(directory), dtype="float32", device="cpu", max_sequences=1, prefix_caching=False)
        prompt, params = made[index]
        (completion,) = solo.generate([prompt], params)
        assert found[index] == texts(completion.samples)


def test_a_short_soak_equals_solo_runs(tmp_path: Path) -> None:
    soak(save_model(tmp_path / "model", "plain"), 120, 12)


@pytest.mark.slow
def test_a_soak_of_2000_requests_equals_solo_runs(tmp_path: Path) -> None:
    soak(save_model(tmp_path / "model", "plain"), 2000, 100)


@pytest.mark.case(37)
def test_identical_prompts_one_after_the_other_answer_alike_within_a_window(tmp_path: Path) -> None:
    engine = Engine(str(save_model(tmp_path / "model", "windowed")), dtype="float32", device="cpu", block_size=4)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    answers = [next(engine.generate([ids_of(40)], params)).samples[0].token_ids for _ in range(4)]
    assert answers == [answers[0]] * 4
    assert engine.metrics.num_cached_tokens > 0
