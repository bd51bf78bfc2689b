"""A row whose context does not fit into the pool: refused where that is known, never cut short, never in the way."""

from __future__ import annotations

import pytest

from batchgen.records import Completion, PartialSample, Prompt
from batchgen.sampling_params import SamplingParams
from tests.engine.fakes import expected_ids, make_fake, params, prompt_ids, run

SLOTS = 32
"""8 blocks of 4."""


def assert_refused(completion: Completion) -> None:
    assert completion.error is not None
    assert completion.error.code == "kv_capacity"
    assert "engine.kv_cache_memory" in completion.error.message
    assert all(sample.finish_reason is None for sample in completion.samples)
    assert all(not sample.token_ids for sample in completion.samples), "no truncated text"


@pytest.mark.parametrize(("length", "max_tokens"), [(10, 22), (31, 1), (1, 31)])
def test_a_row_that_fills_the_pool_exactly_runs(length: int, max_tokens: int) -> None:
    fake = make_fake(num_blocks=8)
    (completion,) = run(fake, [prompt_ids(length)], params(max_tokens))
    assert completion.error is None
    assert completion.samples[0].token_ids == expected_ids(prompt_ids(length), params(max_tokens), 0)


@pytest.mark.parametrize(("length", "max_tokens"), [(10, 23), (32, 1), (1, 32), (60, 20)])
def test_prompt_plus_explicit_max_tokens_beyond_the_pool_is_refused_unseen(length: int, max_tokens: int) -> None:
    fake = make_fake(num_blocks=8)
    (completion,) = run(fake, [prompt_ids(length)], params(max_tokens))
    assert_refused(completion)
    assert fake.runner.num_steps == 0
    assert completion.error is not None
    assert f"{length} tokens and max_tokens {max_tokens}" in completion.error.message


@pytest.mark.case(38)
def test_a_row_of_20_blocks_in_a_pool_of_8_does_not_keep_5_small_ones_waiting() -> None:
    fake = make_fake(num_blocks=8)
    prompts = [prompt_ids(6, row) for row in range(6)]
    prompts[2] = prompt_ids(70, 2)
    completions = run(fake, prompts, params(10))
    assert_refused(completions[2])
    for row in (0, 1, 3, 4, 5):
        assert completions[row].samples[0].token_ids == expected_ids(prompts[row], params(10), row)


def test_the_rule_counts_one_sequence_however_many_samples_there_are() -> None:
    fake = make_fake(num_blocks=8)
    (completion,) = run(fake, [prompt_ids(10)], params(22, n=6))
    assert completion.error is None
    for sample, drawn in enumerate(completion.samples):
        assert drawn.token_ids == expected_ids(prompt_ids(10), params(22), 0, sample)


def test_with_the_default_max_tokens_a_row_fails_only_when_it_fills_the_pool_alone() -> None:
    fake = make_fake(num_blocks=8)
    completions = run(fake, [prompt_ids(5, row) for row in range(3)], [params(20), params(None), params(12)])
    assert_refused(completions[1])
    for row, max_tokens in ((0, 20), (2, 12)):
        assert completions[row].samples[0].token_ids == expected_ids(prompt_ids(5, row), params(max_tokens), row)


def test_with_the_default_max_tokens_a_row_that_ends_in_time_is_whole() -> None:
    fake = make_fake(num_blocks=8, eos_every=9)
    open_ended = SamplingParams(seed=5)
    (completion,) = run(fake, [prompt_ids(5)], open_ended)
    limited = SamplingParams(seed=5, max_tokens=27)
    assert completion.error is None
    assert completion.samples[0].token_ids == expected_ids(prompt_ids(5), limited, 0, eos_every=9)
    assert completion.samples[0].finish_reason == "stop"


def test_the_pool_may_be_filled_to_its_last_slot_by_an_open_ended_row() -> None:
    # 32 slots take 32 tokens, and the 33rd is drawn from them; at 33 the context ends.
    fake = make_fake(num_blocks=8, max_model_len=33)
    (completion,) = run(fake, [prompt_ids(5)], params(None))
    assert completion.error is None
    assert len(completion.samples[0].token_ids) == 28
    fake = make_fake(num_blocks=8, max_model_len=34)
    (completion,) = run(fake, [prompt_ids(5)], params(None))
    assert_refused(completion)


@pytest.mark.parametrize("length", [33, 60])
def test_a_prompt_longer_than_the_pool_is_refused_without_waiting_for_the_others(length: int) -> None:
    fake = make_fake(num_blocks=8)
    prompts = [prompt_ids(6, 0), prompt_ids(length, 1), prompt_ids(6, 2)]
    indexes = [
        fake.engine.add(Prompt(token_ids=prompt), params(None if len(prompt) > 32 else 20)) for prompt in prompts
    ]
    first = fake.engine.step()
    assert [completion.prompt_index for completion in first] == [indexes[1]]
    assert_refused(first[0])
    fake.engine.close()
    fake.assert_all_free()


@pytest.mark.parametrize("max_sequences", [1, 2, 16])
def test_one_sample_that_fills_the_pool_leaves_the_others_whole(max_sequences: int) -> None:
    fake = make_fake(num_blocks=8, eos_every=30, max_sequences=max_sequences)
    (completion,) = run(fake, [prompt_ids(5)], SamplingParams(seed=5, n=6))
    whole = [expected_ids(prompt_ids(5), SamplingParams(seed=5, max_tokens=28), 0, s, eos_every=30) for s in range(6)]
    fits = [len(ids) < 28 or ids[-1] == 96 for ids in whole]
    assert 0 < sum(fits) < 6, "some end in time and some do not"
    assert completion.error is not None
    assert completion.error.code == "kv_capacity"
    for sample, ids, fit in zip(completion.samples, whole, fits, strict=True):
        assert sample.token_ids == (ids if fit else [])
        assert sample.finish_reason == ("stop" if fit else None)


def test_a_resumed_row_is_refused_by_the_same_rule() -> None:
    fake = make_fake(num_blocks=8)
    partial = [PartialSample(0, [1, 2, 3]), PartialSample(1, [4] * 22)]
    prompt = Prompt(token_ids=prompt_ids(11), partial=partial, row=0)
    (completion,) = run(fake, [prompt], params(22, n=2))
    assert completion.error is not None
    assert completion.error.code == "kv_capacity"
    assert completion.samples[1].token_ids == [4] * 22, "what had ended already is kept"


def test_the_error_depends_on_the_row_alone() -> None:
    def message(neighbours: int) -> str:
        fake = make_fake(num_blocks=8)
        prompts = [prompt_ids(5, 0), *(prompt_ids(6, row) for row in range(neighbours))]
        completion = run(fake, prompts, [params(None), *[params(12)] * neighbours])[0]
        assert completion.error is not None
        return completion.error.message

    assert message(0) == message(5)
