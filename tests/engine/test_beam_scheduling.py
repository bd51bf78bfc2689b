"""Beam searches beside samples: their places, their blocks, their preemption and their failures."""

from __future__ import annotations

import pytest
import torch

from batchgen.records import Completion, Prompt
from batchgen.sampling_params import BeamParams, SamplingParams
from tests.engine.fakes import Fake, expected_ids, make_fake, params, prompt_ids, run, steps


def beams(width: int, max_tokens: int | None = 10) -> SamplingParams:
    return SamplingParams(beam=BeamParams(width=width), max_tokens=max_tokens, seed=5)


def alone(prompt: list[int], params: SamplingParams) -> Completion:
    (completion,) = run(make_fake(num_blocks=512, max_sequences=64), [prompt], params)
    return completion


MIXED = [beams(3), params(12, n=3), beams(2, 20), params(20), beams(5, 6), params(9, n=4)]


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize(("num_blocks", "max_sequences"), [(256, 32), (256, 5), (40, 8), (24, 16), (23, 5)])
def test_beams_and_samples_give_the_same_however_they_are_scheduled(
    num_blocks: int, max_sequences: int, prefix_caching: bool
) -> None:
    prompts = [prompt_ids(5 + row, row // 3) for row in range(12)]
    params = [MIXED[row % len(MIXED)] for row in range(12)]
    fake = make_fake(num_blocks, max_sequences=max_sequences, max_batch_tokens=32, prefix_caching=prefix_caching)
    for row, completion in enumerate(run(fake, prompts, params)):
        assert completion.error is None
        if params[row].beam is None:
            for sample, drawn in enumerate(completion.samples):
                assert drawn.token_ids == expected_ids(prompts[row], params[row], row, sample)
        else:
            assert completion.samples == alone(prompts[row], params[row]).samples
    if num_blocks == 24:
        assert fake.engine.metrics.num_preemptions > 0


@pytest.mark.parametrize("max_sequences", [4, 5, 6])
def test_samples_are_not_born_into_the_places_that_beams_will_need(max_sequences: int) -> None:
    fake = make_fake(num_blocks=256, max_sequences=max_sequences, max_batch_tokens=max_sequences)
    fake.engine.add(Prompt(token_ids=prompt_ids(1, 0)), beams(3))
    fake.engine.add(Prompt(token_ids=prompt_ids(1, 1)), params(10, n=4))
    fake.engine.add(Prompt(token_ids=prompt_ids(1, 2)), params(10, n=4))
    most = max(len(fake.scheduler.running) for _ in steps(fake))
    assert most == max_sequences


def test_only_tails_of_beams_are_copied() -> None:
    fake = make_fake(num_blocks=64)
    run(fake, [prompt_ids(40)], beams(4, 12))
    metrics = fake.engine.metrics
    assert metrics.num_copies <= 12 * 3
    assert metrics.peak_blocks_held <= 10 + 4 * 3 + 4


def test_more_beams_than_sequences_are_refused() -> None:
    fake = make_fake(max_sequences=4)
    completions = run(fake, [prompt_ids(5), prompt_ids(5)], [beams(5), beams(4)])
    assert completions[0].error is not None
    assert completions[0].error.code == "kv_capacity"
    assert completions[1].error is None


def test_capacity_of_beams_counts_the_prompts_full_blocks_once() -> None:
    # Prompt 10: two full blocks once; tails of 2 + 10 tokens are three blocks for each of 3 beams, and 3 for copies.
    prompt, needed = prompt_ids(10), 2 + 3 * 3 + 3
    (completion,) = run(make_fake(num_blocks=needed), [prompt], beams(3))
    assert completion.error is None
    assert completion.samples == alone(prompt, beams(3)).samples
    (completion,) = run(make_fake(num_blocks=needed - 1), [prompt], beams(3))
    assert completion.error is not None
    assert completion.error.code == "kv_capacity"


def test_an_open_ended_search_that_fills_the_pool_alone_is_a_row_error() -> None:
    fake = make_fake(num_blocks=12)
    completions = run(fake, [prompt_ids(6, row) for row in range(3)], [beams(3, None), params(9), beams(2)])
    assert completions[0].error is not None
    assert completions[0].error.code == "kv_capacity"
    assert completions[0].samples == []
    assert completions[1].error is None
    assert completions[2].samples == alone(prompt_ids(6, 2), beams(2)).samples


@pytest.mark.parametrize("num_steps", [0, 1, 2, 6])
def test_an_abort_of_beams_leaves_every_block_free(num_steps: int) -> None:
    fake = make_fake(num_blocks=20, max_batch_tokens=16)
    doomed = fake.engine.add(Prompt(token_ids=prompt_ids(20)), beams(3, 12))
    kept = fake.engine.add(Prompt(token_ids=prompt_ids(6, 1)), beams(2))
    for _ in range(num_steps):
        fake.engine.step()
    fake.engine.abort(doomed)
    fake.engine.check_integrity()
    done = {completion.prompt_index: completion for step in steps(fake) for completion in step}
    assert list(done) == [kept]
    assert done[kept].samples == alone(prompt_ids(6, 1), beams(2)).samples
    fake.assert_all_free()


@pytest.mark.parametrize("when", [0, 1, 4])
def test_beams_survive_a_step_that_failed(when: int) -> None:
    fake = make_fake(num_blocks=64)
    rows = [(prompt_ids(6, row), beams(2 + row)) for row in range(3)]
    for prompt, searched in rows:
        fake.engine.add(Prompt(token_ids=prompt), searched)
    done: list[Completion] = []
    for number, step in enumerate(steps(fake)):
        done.extend(step)
        if number == when:
            fake.runner.failures.append(torch.OutOfMemoryError("once"))
    assert fake.engine.metrics.num_shrinks == 1
    for completion in done:
        assert completion.samples == alone(*rows[completion.prompt_index]).samples
    fake.assert_all_free()


def test_beams_that_the_device_never_has_room_for_become_a_row_error() -> None:
    fake = make_fake(num_blocks=64, max_sequences=8, max_batch_tokens=16)
    fake.runner.max_tokens = 3
    rows = [(prompt_ids(6, 0), beams(4)), (prompt_ids(6, 1), beams(2)), (prompt_ids(6, 2), params(5))]
    completions = run(fake, [prompt for prompt, _ in rows], [params for _, params in rows])
    assert completions[0].error is not None
    assert completions[0].error.code == "out_of_memory"
    assert completions[1].samples == alone(*rows[1]).samples
    assert completions[2].samples[0].token_ids == expected_ids(*rows[2], row=2)


def test_a_search_of_one_beam_that_fails_alone_is_a_row_error() -> None:
    fake = make_fake(num_blocks=64, max_sequences=8, max_batch_tokens=16)
    fake.runner.max_tokens = 0
    completions = run(fake, [prompt_ids(6, 0)], beams(1))
    assert completions[0].error is not None
    assert completions[0].error.code == "out_of_memory"


def test_a_prefix_is_shared_by_beams_of_different_prompts() -> None:
    fake: Fake = make_fake(num_blocks=256, max_batch_tokens=256)
    prefix = prompt_ids(40)
    run(fake, [[*prefix, row] for row in range(4)], beams(3))
    assert fake.engine.metrics.num_cached_tokens >= 3 * 40
