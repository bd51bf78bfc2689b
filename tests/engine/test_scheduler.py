from __future__ import annotations

import pytest

from batchgen.engine.block_pool import BlockPool
from batchgen.engine.scheduler import Scheduler
from batchgen.records import Prompt
from batchgen.sampling_params import SamplingParams
from tests.engine.fakes import expected_ids, make_fake, prompt_ids, run, steps


def params(max_tokens: int, n: int = 1, seed: int = 5) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, n=n, seed=seed, ignore_eos=True)


def test_every_sample_is_what_it_is_alone() -> None:
    fake = make_fake(num_blocks=256)
    prompts = [prompt_ids(1 + 3 * row, row) for row in range(12)]
    completions = run(fake, prompts, params(10, n=3))
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        assert completion.error is None
        assert completion.prompt_token_ids == prompt
        for sample, drawn in enumerate(completion.samples):
            assert drawn.token_ids == expected_ids(prompt, params(10), row, sample)
            assert drawn.finish_reason == "length"


@pytest.mark.parametrize("budget", [16, 17, 40])
def test_a_step_never_computes_more_than_the_budget(budget: int) -> None:
    fake = make_fake(num_blocks=256, max_batch_tokens=budget, max_sequences=16, keeps_batches=True)
    run(fake, [prompt_ids(30 + row, row) for row in range(20)], params(6))
    assert max(batch.num_tokens for batch in fake.runner.batches) == budget


def test_every_running_sequence_gets_its_token_before_any_prompt_is_read() -> None:
    fake = make_fake(num_blocks=256, max_batch_tokens=8, max_sequences=8, keeps_batches=True)
    run(fake, [prompt_ids(3, row) for row in range(3)] + [prompt_ids(60, 9)], params(20))
    for batch in fake.runner.batches:
        reads_prompt = [chunk.num_tokens > 1 or chunk.start < 3 for chunk in batch.chunks]
        assert reads_prompt == sorted(reads_prompt)
    generating = [sum(chunk.start >= 3 and chunk.num_tokens == 1 for chunk in b.chunks) for b in fake.runner.batches]
    assert max(generating) >= 3


def test_a_long_prompt_is_read_in_chunks_beside_the_running_sequences() -> None:
    fake = make_fake(num_blocks=256, max_batch_tokens=16, max_sequences=4, keeps_batches=True, prefix_caching=False)
    run(fake, [prompt_ids(100, 1)], params(1))
    assert [batch.num_tokens for batch in fake.runner.batches] == [16] * 6 + [4]
    assert [len(batch.samples) for batch in fake.runner.batches] == [0] * 6 + [1]


def test_no_more_than_max_sequences_run_at_once() -> None:
    fake = make_fake(num_blocks=256, max_sequences=5)
    for row in range(20):
        fake.engine.add(Prompt(token_ids=prompt_ids(4, row)), params(5, n=2))
    assert max(len(fake.scheduler.running) for _ in steps(fake)) == 5


@pytest.mark.parametrize("max_sequences", [1, 2, 3, 8])
def test_samples_that_do_not_fit_together_run_in_turns_with_equal_output(max_sequences: int) -> None:
    fake = make_fake(num_blocks=256, max_sequences=max_sequences)
    prompts = [prompt_ids(6, row) for row in range(3)]
    for row, completion in enumerate(run(fake, prompts, params(9, n=5))):
        for sample, drawn in enumerate(completion.samples):
            assert drawn.token_ids == expected_ids(prompts[row], params(9), row, sample)


@pytest.mark.parametrize("num_samples", [1, 2, 6])
def test_n_samples_of_a_prompt_cost_n_minus_1_copies_of_one_block(num_samples: int) -> None:
    fake = make_fake(num_blocks=64)
    run(fake, [prompt_ids(6)], params(9, n=num_samples))
    assert fake.engine.metrics.num_copies == num_samples - 1
    fake = make_fake(num_blocks=64)
    run(fake, [prompt_ids(8)], params(9, n=num_samples))
    assert fake.engine.metrics.num_copies == 0


def test_n_samples_compute_their_prompt_once() -> None:
    fake = make_fake(num_blocks=64, prefix_caching=False)
    run(fake, [prompt_ids(30)], params(4, n=5))
    assert fake.runner.num_computed == 30 + 5 * 3, "the last token of a sample is never computed"


def test_samples_are_born_with_one_row_of_logits() -> None:
    fake = make_fake(num_blocks=64, keeps_batches=True)
    run(fake, [prompt_ids(5)], params(1, n=7))
    assert len(fake.runner.batches) == 1
    assert len(fake.runner.batches[0].samples) == 7
    assert fake.runner.num_sampled_rows == 1


@pytest.mark.parametrize("budget", [64, 512, 4096])
def test_64_rows_with_a_prefix_of_512_tokens_compute_it_once(budget: int) -> None:
    fake = make_fake(num_blocks=1024, block_size=16, max_batch_tokens=budget, max_sequences=64, max_model_len=1024)
    prefix = prompt_ids(512, 7)
    prompts = [prefix + prompt_ids(1 + row % 40, 100 + row) for row in range(64)]
    run(fake, prompts, params(1))
    assert fake.runner.num_computed == 512 + sum(len(prompt) - 512 for prompt in prompts)
    assert fake.engine.metrics.num_cached_tokens == 63 * 512


def test_equal_prompts_admitted_in_one_step_compute_only_their_last_block_each() -> None:
    fake = make_fake(num_blocks=256, block_size=4, max_batch_tokens=512, max_sequences=32, keeps_batches=True)
    completions = run(fake, [prompt_ids(40)] * 32, params(1))
    assert len(fake.runner.batches) == 1
    assert fake.runner.num_computed == 40 + 31 * 4, "a hit ends at the last border before the last token"
    assert [completion.cached_tokens for completion in completions] == [0] + [36] * 31


@pytest.mark.parametrize(("length", "cached"), [(8, 4), (9, 8), (12, 8), (13, 12)])
def test_the_last_prompt_token_is_always_computed(length: int, cached: int) -> None:
    fake = make_fake()
    run(fake, [prompt_ids(length)], params(1))
    (again,) = run(fake, [prompt_ids(length)], params(1))
    assert again.cached_tokens == cached


def test_a_finished_answer_is_a_prefix_too() -> None:
    fake = make_fake()
    prompt = prompt_ids(5)
    (first,) = run(fake, [prompt], params(12))
    (second,) = run(fake, [prompt + first.samples[0].token_ids], params(1))
    assert second.cached_tokens == 16, "17 tokens, of which the last was drawn but never computed"


def test_without_a_cache_nothing_is_shared_between_prompts() -> None:
    fake = make_fake(prefix_caching=False)
    run(fake, [prompt_ids(20)] * 3, params(1))
    assert fake.runner.num_computed == 60
    assert fake.engine.metrics.num_cached_tokens == 0


def test_a_forced_hash_collision_changes_no_token() -> None:
    fake = make_fake(num_blocks=40, hash_fn=lambda _, __: 1)
    prompts = [prompt_ids(4) * 5 + prompt_ids(6, row % 3) for row in range(12)]
    for row, completion in enumerate(run(fake, prompts, params(8))):
        assert completion.samples[0].token_ids == expected_ids(prompts[row], params(8), row)


def test_rows_with_a_common_prefix_run_together_wherever_they_stand() -> None:
    def peak_blocks(interleaved: bool) -> int:
        fake = make_fake(num_blocks=256, max_sequences=4, max_batch_tokens=128)
        prefixes = [prompt_ids(32, salt) for salt in (1, 2)]
        rows = [(prefixes[index % 2 if interleaved else index // 8], index) for index in range(16)]
        run(fake, [prefix + prompt_ids(3, index) for prefix, index in rows], params(6))
        return fake.engine.metrics.peak_blocks_held

    assert peak_blocks(interleaved=True) == peak_blocks(interleaved=False)


def test_long_answers_start_first_and_no_row_starves() -> None:
    fake = make_fake(num_blocks=256, max_sequences=2)
    lengths = [3, 3, 50, 3, 3, 20]
    order = [
        fake.engine.add(Prompt(token_ids=prompt_ids(6, row)), params(length)) for row, length in enumerate(lengths)
    ]
    fake.engine.step()
    assert {sequence.group.prompt_index for sequence in fake.scheduler.running} == {order[2], order[5]}
    # Newcomers with longer answers do not overtake those that wait already.
    late = [fake.engine.add(Prompt(token_ids=prompt_ids(6, 50 + row)), params(60)) for row in range(3)]
    finished = [completion.prompt_index for step in steps(fake) for completion in step]
    assert set(finished[:6]) == set(order)
    assert set(finished[6:]) == set(late)


def test_a_budget_below_one_token_per_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_batch_tokens \(4\) must be at least max_sequences \(8\)"):
        Scheduler(BlockPool(8, 4), max_batch_tokens=4, max_sequences=8)


def test_useful_share_counts_shared_blocks_once() -> None:
    fake = make_fake(num_blocks=64)
    fake.engine.add(Prompt(token_ids=prompt_ids(6)), params(9, n=4))
    fake.engine.step()
    # Two blocks hold six tokens of all four samples.
    assert fake.pool.num_held == 2
    assert fake.scheduler.useful_share() == 6 / 8
    fake.engine.step()
    # A full block of the prompt, and three tokens in a tail of each sample.
    assert fake.pool.num_held == 5
    assert fake.scheduler.useful_share() == (4 + 4 * 3) / 20
    fake.engine.close()
    assert fake.scheduler.useful_share() == 1.0
