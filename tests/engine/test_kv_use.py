"""How much of the held KV cache is in use, and how many rows a small pool gets through."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from batchgen.engine.batch import Batch
from batchgen.engine.loading import CPU_MAX_BATCH_TOKENS, CPU_MAX_SEQUENCES
from batchgen.records import Prompt
from batchgen.sampling_params import SamplingParams
from tests.engine.fakes import Fake, expected_ids, make_fake, prompt_ids, run, steps

WORKLOAD = Path(__file__).parents[2] / "benchmarks" / "workloads" / "plain.json"
"""64 prompts of 32 to 256 tokens, answers of 16 to 128."""


def test_mean_useful_share_of_the_plain_workload_is_at_least_96_percent() -> None:
    workload = json.loads(WORKLOAD.read_text())
    prompts = [prompt_ids(len(prompt), row) for row, prompt in enumerate(workload["prompts"])]
    params = [SamplingParams(max_tokens=length, seed=1, ignore_eos=True) for length in workload["max_new"]]
    # The steps of the real engine on a processor, of which every fourth is measured.
    fake = make_fake(
        2048,
        block_size=16,
        max_batch_tokens=CPU_MAX_BATCH_TOKENS,
        max_sequences=CPU_MAX_SEQUENCES,
        checks_context=False,
    )
    run(fake, prompts, params)
    assert fake.engine.metrics.num_kv_samples > 30
    assert fake.engine.metrics.mean_useful_share >= 0.96


@pytest.mark.slow
def test_2000_random_requests_on_a_small_pool_equal_solo_runs_and_leave_nothing_held() -> None:
    generator = random.Random(11)
    fake: Fake = make_fake(num_blocks=24, max_batch_tokens=24, max_sequences=12, eos_every=25)
    prefixes = [prompt_ids(length, 500 + length) for length in (4, 9, 17, 30)]
    wanted: dict[int, tuple[list[int], SamplingParams]] = {}
    aborted: set[int] = set()
    for row in range(2000):
        prefix = generator.choice(prefixes) if generator.random() < 0.5 else []
        prompt = prefix + prompt_ids(generator.randint(1, 30), row)
        params = SamplingParams(max_tokens=generator.randint(1, 30), n=generator.choice([1, 1, 1, 2, 4]), seed=row)
        wanted[fake.engine.add(Prompt(token_ids=prompt, row=row), params)] = (prompt, params)
    done = {}
    for step in steps(fake):
        done.update({completion.prompt_index: completion for completion in step})
        if generator.random() < 0.02:
            doomed = generator.choice(list(wanted))
            if doomed not in done:
                fake.engine.abort(doomed)
                aborted.add(doomed)
    fake.assert_all_free()
    assert fake.engine.metrics.num_preemptions > 100
    assert set(done) == set(wanted) - aborted
    for index, completion in done.items():
        prompt, params = wanted[index]
        assert completion.error is None
        for sample, drawn in enumerate(completion.samples):
            assert drawn.token_ids == expected_ids(prompt, params, index, sample, eos_every=25)


@pytest.mark.case(34)
def test_no_step_writes_into_a_block_that_two_rows_own_differently() -> None:
    # Every context is read back in full by the fake model.
    fake = make_fake(num_blocks=40, keeps_batches=True)
    prompts = [prompt_ids(6, row) for row in range(4)]
    params = SamplingParams(max_tokens=12, n=3, seed=5, ignore_eos=True)
    for row, completion in enumerate(run(fake, prompts, params)):
        for sample, drawn in enumerate(completion.samples):
            assert drawn.token_ids == expected_ids(prompts[row], params, row, sample)
    copies: list[Batch] = [batch for batch in fake.runner.batches if batch.copies]
    assert sum(len(batch.copies) for batch in copies) == 4 * 2, "one copy for each writer but the last"
