"""Steps on an asynchronous device: planned and launched before the tokens of the step before are known."""

from __future__ import annotations

import pytest
import torch

from batchgen.records import Completion, PartialSample, Prompt
from batchgen.sampling_params import BeamParams, SamplingParams
from tests.engine.fakes import Fake, expected_ids, make_fake, prompt_ids, run, steps


def params(max_tokens: int, n: int = 1, **options: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, n=n, seed=5, **options)  # type: ignore[arg-type]


def assert_as_alone(fake: Fake, prompts: list[list[int]], max_tokens: int, n: int = 1, eos_every: int = 40) -> None:
    for row, completion in enumerate(run(fake, prompts, params(max_tokens, n))):
        assert completion.error is None
        for sample, drawn in enumerate(completion.samples):
            assert drawn.token_ids == expected_ids(prompts[row], params(max_tokens), row, sample, eos_every=eos_every)


def test_a_step_is_left_running_until_its_successor_is_launched() -> None:
    fake = make_fake(is_asynchronous=True)
    fake.engine.add(Prompt(token_ids=prompt_ids(6)), params(3, ignore_eos=True))
    launched = []
    for _ in range(4):
        completions = fake.engine.step()
        launched.append((fake.runner.num_steps, fake.engine.metrics.num_drawn_tokens, len(completions)))
    # The third token is the last one: nothing is launched after it, and what was on its way is waited for.
    assert launched == [(1, 0, 0), (2, 1, 0), (3, 2, 0), (3, 3, 1)]
    fake.assert_all_free()


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("num_blocks", [10, 14, 20, 256])
@pytest.mark.parametrize("n", [1, 3])
def test_pipelined_steps_give_the_same_text(num_blocks: int, prefix_caching: bool, n: int) -> None:
    fake = make_fake(num_blocks, prefix_caching=prefix_caching, eos_every=40, is_asynchronous=True)
    prefix = prompt_ids(9, 77)
    assert_as_alone(fake, [prefix[: row % 10] + prompt_ids(1 + row % 4, row) for row in range(12)], 24, n=n)
    assert fake.runner.num_ahead > fake.runner.num_steps // 2
    assert (fake.engine.metrics.num_preemptions > 0) == (num_blocks < 256)


@pytest.mark.parametrize("max_sequences", [1, 2, 5])
def test_samples_that_take_turns_wait_for_the_token_on_its_way(max_sequences: int) -> None:
    fake = make_fake(256, max_sequences=max_sequences, eos_every=12, is_asynchronous=True)
    assert_as_alone(fake, [prompt_ids(5, row) for row in range(6)], 20, n=4, eos_every=12)


def test_a_token_after_the_end_is_computed_in_vain_and_counts_for_nothing() -> None:
    results = {}
    for is_asynchronous in (False, True):
        fake = make_fake(eos_every=15, is_asynchronous=is_asynchronous)
        assert_as_alone(fake, [prompt_ids(5, row) for row in range(8)], 40, n=2, eos_every=15)
        results[is_asynchronous] = (fake.engine.metrics, fake.runner.num_computed)
    (metrics, computed), (pipelined, pipelined_computed) = results[False], results[True]
    assert pipelined.num_drawn_tokens == metrics.num_drawn_tokens
    assert pipelined.num_generated_tokens == metrics.num_generated_tokens
    assert computed < pipelined_computed <= computed + 16


def test_a_row_that_just_fits_is_not_refused_for_a_token_that_may_never_come() -> None:
    # The pool holds the prompt and the answer up to its end, and not one token more.
    prompt = prompt_ids(6, 3)
    open_end = SamplingParams(seed=5)
    answer = expected_ids(prompt, params(400), 0, eos_every=20)
    assert answer[-1] == 96
    num_blocks = -(-(len(prompt) + len(answer) - 1) // 4)
    prompt_that_fills = prompt
    while (len(prompt_that_fills) + len(answer) - 1) % 4:
        # Another prompt of a length at which the last block is full.
        prompt_that_fills = prompt_ids(len(prompt_that_fills) + 1, 3)
        answer = expected_ids(prompt_that_fills, params(400), 0, eos_every=20)
        num_blocks = -(-(len(prompt_that_fills) + len(answer) - 1) // 4)
    fake = make_fake(num_blocks, eos_every=20, is_asynchronous=True)
    (completion,) = run(fake, [prompt_that_fills], open_end)
    assert completion.error is None
    assert completion.samples[0].token_ids == answer


def test_a_row_that_fills_the_pool_is_an_error_all_the_same() -> None:
    fake = make_fake(5, is_asynchronous=True)
    (completion,) = run(fake, [prompt_ids(6)], SamplingParams(seed=5, ignore_eos=True))
    assert completion.error is not None
    assert completion.error.code == "kv_capacity"


BEAMS = SamplingParams(max_tokens=8, seed=5, beam=BeamParams(width=3))
MIXED = [
    params(12),
    params(12, n=2, frequency_penalty=0.5),
    BEAMS,
    params(9, prompt_logprobs=1),
    params(0, prompt_logprobs=2),
    params(7, min_tokens=3),
]


def mixed(is_asynchronous: bool, num_blocks: int) -> tuple[Fake, list[Completion]]:
    fake = make_fake(num_blocks, eos_every=15, is_asynchronous=is_asynchronous, max_batch_tokens=24)
    prompts = [prompt_ids(5 + row % 7, row) for row in range(18)]
    return fake, run(fake, prompts, [MIXED[row % len(MIXED)] for row in range(18)])


@pytest.mark.parametrize("num_blocks", [24, 200])
def test_what_needs_the_tokens_on_the_host_runs_beside_what_does_not(num_blocks: int) -> None:
    _, expected = mixed(False, num_blocks)
    fake, completions = mixed(True, num_blocks)
    for ours, theirs in zip(completions, expected, strict=True):
        assert ours.samples == theirs.samples
        assert ours.prompt_logprobs == theirs.prompt_logprobs
        assert ours.error == theirs.error
    assert fake.runner.num_ahead < fake.runner.num_steps


@pytest.mark.parametrize("kind", [BEAMS, params(9, repetition_penalty=1.2), params(0, prompt_logprobs=1)])
def test_a_step_that_must_be_known_is_waited_for(kind: SamplingParams) -> None:
    fake = make_fake(is_asynchronous=True)
    run(fake, [prompt_ids(6, row) for row in range(4)], kind)
    assert fake.runner.num_ahead == 0


@pytest.mark.parametrize("num_steps", range(1, 8))
def test_an_abort_while_a_step_is_on_its_way(num_steps: int) -> None:
    fake = make_fake(16, max_batch_tokens=16, is_asynchronous=True)
    doomed = fake.engine.add(Prompt(token_ids=prompt_ids(20, 1), row=1), params(30, n=2, ignore_eos=True))
    kept = fake.engine.add(Prompt(token_ids=prompt_ids(5, 2), row=2), params(10, ignore_eos=True))
    for _ in range(num_steps):
        assert fake.engine.step() == []
    fake.engine.abort(doomed)
    fake.engine.check_integrity()
    done = {completion.prompt_index: completion for step in steps(fake) for completion in step}
    assert done.keys() == {kept}
    assert done[kept].samples[0].token_ids == expected_ids(prompt_ids(5, 2), params(10, ignore_eos=True), 2)
    fake.assert_all_free()


def test_after_close_the_engine_goes_on() -> None:
    fake = make_fake(12, is_asynchronous=True)
    for row in range(8):
        fake.engine.add(Prompt(token_ids=prompt_ids(7, row)), params(20, n=2))
    for _ in range(9):
        fake.engine.step()
    fake.engine.close()
    fake.assert_all_free()
    (completion,) = fake.engine.generate([prompt_ids(7, 3)], params(6))
    assert completion.samples[0].token_ids == expected_ids(prompt_ids(7, 3), params(6), 0)


def test_partials_hold_what_is_known() -> None:
    fake = make_fake(is_asynchronous=True)
    prompt, asked = prompt_ids(6), params(5, ignore_eos=True)
    fake.engine.add(Prompt(token_ids=prompt, row=0), asked)
    fake.engine.step()
    assert list(fake.engine.partials()) == []
    fake.engine.step()
    ((_, [begun]),) = fake.engine.partials()
    assert begun.token_ids == expected_ids(prompt, asked, 0)[:1]
    resumed = Prompt(token_ids=prompt, row=0, partial=[PartialSample(0, begun.token_ids, begun.cumulative_logprob)])
    (completion,) = run(make_fake(is_asynchronous=True), [resumed], asked)
    assert completion.samples[0].token_ids == expected_ids(prompt, asked, 0)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("error", [RuntimeError("a kernel failed"), KeyboardInterrupt()])
def test_a_failed_step_takes_those_on_their_way_with_it(error: BaseException, waits: bool) -> None:
    fake = make_fake(128, max_batch_tokens=512, max_sequences=32, is_asynchronous=True)
    prompt, asked = prompt_ids(40), params(6, n=2, ignore_eos=True)
    for row in range(8):
        fake.engine.add(Prompt(token_ids=prompt, row=row), asked)
    for _ in range(3):
        fake.engine.step()
    (fake.engine._sampler if waits else fake.runner).failures.append(error)  # type: ignore[attr-defined]
    with pytest.raises(type(error)):
        fake.engine.step()
    fake.engine.check_integrity()
    fake.runner.states = [[None] * 4 for _ in fake.runner.states]
    fake.engine._scheduler._roster.blocks.prefix_cache = None
    done = {completion.prompt_index: completion for step in steps(fake) for completion in step}
    for row in range(8):
        for sample in range(2):
            assert done[row].samples[sample].token_ids == expected_ids(prompt, asked, row, sample)
    fake.assert_all_free()


def test_out_of_memory_lands_what_is_on_its_way_and_goes_on_with_half() -> None:
    fake = make_fake(max_batch_tokens=64, max_sequences=16, is_asynchronous=True)
    prompts = [prompt_ids(9, row) for row in range(12)]
    for row, prompt in enumerate(prompts):
        fake.engine.add(Prompt(token_ids=prompt, row=row), params(8, ignore_eos=True))
    fake.engine.step()
    fake.engine.step()
    fake.runner.failures.append(torch.OutOfMemoryError("device"))
    done = {completion.prompt_index: completion for step in steps(fake) for completion in step}
    assert fake.scheduler.max_batch_tokens == 32
    for row, prompt in enumerate(prompts):
        assert done[row].samples[0].token_ids == expected_ids(prompt, params(8, ignore_eos=True), row)
