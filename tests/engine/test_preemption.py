from __future__ import annotations

import pytest

from batchgen.engine.batch import Batch
from batchgen.engine.sequence import Status
from batchgen.records import Prompt
from batchgen.sampling_params import SamplingParams
from tests.engine.fakes import EOS, Fake, expected_ids, make_fake, prompt_ids, run, steps


def params(max_tokens: int, n: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, n=n, seed=5)


def assert_as_alone(fake: Fake, prompts: list[list[int]], max_tokens: int, n: int = 1) -> None:
    for row, completion in enumerate(run(fake, prompts, params(max_tokens, n))):
        assert completion.error is None
        for sample, drawn in enumerate(completion.samples):
            assert drawn.token_ids == expected_ids(prompts[row], params(max_tokens), row, sample, eos_every=40)


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("num_blocks", [10, 13, 20])
def test_a_pool_that_preempts_gives_the_same_text(num_blocks: int, prefix_caching: bool) -> None:
    fake = make_fake(num_blocks, prefix_caching=prefix_caching, eos_every=40)
    assert_as_alone(fake, [prompt_ids(5 + row % 4, row) for row in range(12)], 30)
    assert fake.engine.metrics.num_preemptions > 3


@pytest.mark.case(35)
def test_a_pool_for_one_and_a_half_sequences_loses_and_doubles_no_token() -> None:
    fake = make_fake(num_blocks=15, eos_every=40)
    assert_as_alone(fake, [prompt_ids(10, row) for row in range(6)], 30)
    assert fake.engine.metrics.num_preemptions > 0
    assert fake.engine.metrics.num_prompt_tokens == 60


@pytest.mark.parametrize(("num_blocks", "max_sequences"), [(10, 2), (10, 3), (14, 3), (10, 16), (14, 16)])
def test_samples_and_shared_prefixes_survive_preemption(num_blocks: int, max_sequences: int) -> None:
    fake = make_fake(num_blocks, max_sequences=max_sequences, eos_every=40)
    prefix = prompt_ids(9, 77)
    assert_as_alone(fake, [prefix + prompt_ids(row % 3, row) for row in range(6)], 24, n=3)
    assert fake.engine.metrics.num_preemptions > 0


def test_the_youngest_is_preempted_first() -> None:
    fake = make_fake(num_blocks=16, max_batch_tokens=16)
    for row in range(10):
        fake.engine.add(Prompt(token_ids=prompt_ids(6, row)), params(40))
    seen = 0
    for _ in steps(fake):
        ages = [sequence.group.age for sequence in fake.scheduler.running]
        assert ages == sorted(ages)
        pushed_out = [s.group.age for s in fake.scheduler._roster.waiting if s.group.age >= 0]
        seen += bool(pushed_out)
        if ages and pushed_out:
            assert max(ages) < min(pushed_out)
    assert seen > 5


def test_the_oldest_gets_on_in_every_step() -> None:
    fake = make_fake(num_blocks=12)
    for row in range(8):
        fake.engine.add(Prompt(token_ids=prompt_ids(7, row)), SamplingParams(max_tokens=40, seed=1, ignore_eos=True))
    fake.engine.step()
    while fake.engine.num_unfinished:
        running = fake.scheduler.running
        oldest, before = (running[0], running[0].num_computed_tokens) if running else (None, 0)
        fake.engine.step()
        assert oldest is None or oldest.status is Status.FINISHED or oldest.num_computed_tokens > before
    fake.assert_all_free()


def test_two_groups_that_each_hold_half_do_not_wait_for_each_other() -> None:
    fake = make_fake(num_blocks=16, eos_every=0)
    # Each takes nearly half of the pool and then needs all of it.
    prompts = [prompt_ids(27, row) for row in range(2)]
    completions = run(fake, prompts, params(37))
    for row, completion in enumerate(completions):
        assert completion.samples[0].token_ids == expected_ids(prompts[row], params(37), row)
    assert fake.engine.metrics.num_preemptions > 0


def test_what_was_just_pushed_out_is_not_pulled_in_in_the_same_step() -> None:
    fake = make_fake(num_blocks=12, keeps_batches=True)
    for row in range(8):
        fake.engine.add(Prompt(token_ids=prompt_ids(7, row)), params(20))
    before = 0
    for _ in steps(fake):
        preemptions = fake.engine.metrics.num_preemptions
        if preemptions > before and fake.runner.batches:
            batch: Batch = fake.runner.batches[-1]
            assert all(chunk.start > 0 for chunk in batch.chunks), "a step that preempts admits nothing"
        before = preemptions


def test_what_was_pushed_out_comes_back_when_it_can_stay_for_a_block() -> None:
    fake = make_fake(num_blocks=40, keeps_batches=True)
    for row in range(12):
        fake.engine.add(Prompt(token_ids=prompt_ids(9, row)), SamplingParams(max_tokens=60, seed=1, ignore_eos=True))
    came: dict[int, int] = {}
    stays: list[int] = []
    for number, _ in enumerate(steps(fake)):
        running = {sequence.group.age for sequence in fake.scheduler.running}
        for age in came.keys() - running:
            stays.append(number - came.pop(age))
        came.update((age, number) for age in running - came.keys())
    assert fake.engine.metrics.num_preemptions > 5
    assert min(stays) >= fake.pool.block_size


def test_the_writer_of_a_shared_prefix_never_leaves_the_step_that_shares_it() -> None:
    fake = make_fake(num_blocks=14, keeps_batches=True)
    prefix = prompt_ids(8, 3)
    for row in range(10):
        fake.engine.add(Prompt(token_ids=prefix + prompt_ids(1 + row % 3, row)), params(20, n=2))
    for _ in steps(fake):
        batch = fake.runner.batches[-1]
        written = {id(chunk.sequence) for chunk in batch.chunks}
        assert all(sequence.status is not Status.WAITING for sequence in fake.scheduler.running)
        assert len(written) == len(batch.chunks), "a sequence has one chunk in a step"
        links = {link.block_id for link in batch.published}
        held = {block for chunk in batch.chunks if chunk.sequence.table for block in chunk.sequence.table.block_ids}
        finished = any(chunk.sequence.table is None for chunk in batch.chunks)
        assert finished or links <= held


def test_a_preempted_prompt_forks_its_samples_once() -> None:
    fake = make_fake(num_blocks=12, max_batch_tokens=16)
    prompts = [prompt_ids(8, 1), prompt_ids(30, 2)]
    completions = run(fake, prompts, [params(20), params(6, n=4)])
    assert [len(completion.samples) for completion in completions] == [1, 4]
    for sample, drawn in enumerate(completions[1].samples):
        assert drawn.token_ids == expected_ids(prompts[1], params(6), 1, sample)


def test_preempted_sequences_reuse_what_is_still_cached() -> None:
    def computed(prefix_caching: bool) -> int:
        fake = make_fake(num_blocks=20, prefix_caching=prefix_caching)
        run(fake, [prompt_ids(16, row) for row in range(8)], params(30))
        return fake.runner.num_computed

    assert computed(True) < computed(False)


def test_eos_among_the_samples_ends_only_its_own() -> None:
    fake = make_fake(num_blocks=14, eos_every=15)
    prompts = [prompt_ids(5, row) for row in range(8)]
    ended = 0
    for row, completion in enumerate(run(fake, prompts, params(20, n=3))):
        for sample, drawn in enumerate(completion.samples):
            assert drawn.token_ids == expected_ids(prompts[row], params(20), row, sample, eos_every=15)
            assert (drawn.finish_reason == "stop") == (drawn.token_ids[-1] == EOS)
            ended += drawn.finish_reason == "stop"
    assert 5 < ended < 24
