"""A step that fails on the device, whatever the reason, leaves no wrong token behind."""

from __future__ import annotations

import pytest
import torch

from batchgen.errors import EngineStalled
from batchgen.records import Prompt
from tests.engine.fakes import Fake, expected_ids, make_fake, params, prompt_ids, run, steps


def assert_as_alone(fake: Fake, prompts: list[list[int]], max_tokens: int, n: int = 1) -> None:
    for row, completion in enumerate(run(fake, prompts, params(max_tokens, n))):
        assert completion.error is None
        for sample, drawn in enumerate(completion.samples):
            assert drawn.token_ids == expected_ids(prompts[row], params(max_tokens), row, sample)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("device"), MemoryError("host")])
def test_out_of_memory_halves_the_budget_and_goes_on(error: BaseException) -> None:
    fake = make_fake(max_batch_tokens=64, max_sequences=16)
    fake.runner.failures.append(error)
    assert_as_alone(fake, [prompt_ids(9, row) for row in range(12)], 8)
    assert fake.scheduler.max_batch_tokens == 32
    assert fake.engine.metrics.num_shrinks == 1


@pytest.mark.case(53)
def test_the_budget_shrinks_until_the_steps_fit() -> None:
    fake = make_fake(max_batch_tokens=64, max_sequences=16)
    fake.runner.max_tokens = 4
    assert_as_alone(fake, [prompt_ids(9, row) for row in range(8)], 8, n=2)
    assert fake.scheduler.max_batch_tokens == 4
    assert fake.scheduler.max_sequences == 4


def test_sharers_of_a_prefix_that_was_never_written_compute_it_themselves() -> None:
    fake = make_fake(num_blocks=128, max_batch_tokens=512)
    prompt = prompt_ids(40)
    fake.runner.failures.append(torch.OutOfMemoryError("device"))
    for row in range(8):
        fake.engine.add(Prompt(token_ids=prompt, row=row), params(4))
    assert fake.engine.step() == []
    # The device wrote nothing after all.
    fake.runner.states = [[None] * 4 for _ in fake.runner.states]
    assert len(fake.scheduler.running) == 0
    done = {completion.prompt_index: completion for step in steps(fake) for completion in step}
    for row in range(8):
        assert done[row].samples[0].token_ids == expected_ids(prompt, params(4), row)


@pytest.mark.parametrize("error", [RuntimeError("a kernel failed"), KeyboardInterrupt()])
def test_any_other_error_is_raised_and_nothing_of_its_step_counts(error: BaseException) -> None:
    fake = make_fake(num_blocks=128, max_batch_tokens=512, max_sequences=32)
    prompt = prompt_ids(40)
    for row in range(8):
        fake.engine.add(Prompt(token_ids=prompt, row=row), params(6, n=2))
    fake.engine.step()
    fake.engine.step()
    late = fake.engine.add(Prompt(token_ids=prompt_ids(30, 4), row=8), params(6))
    fake.runner.failures.append(error)
    with pytest.raises(type(error)):
        fake.engine.step()
    fake.engine.check_integrity()
    fake.runner.states = [[None] * 4 for _ in fake.runner.states]
    # What earlier steps wrote is lost too; only what the failed one published is claimed.
    fake.engine._scheduler._roster.blocks.prefix_cache = None
    done = {completion.prompt_index: completion for step in steps(fake) for completion in step}
    assert done[late].samples[0].token_ids == expected_ids(prompt_ids(30, 4), params(6), 8)
    for row in range(8):
        for sample in range(2):
            assert done[row].samples[sample].token_ids == expected_ids(prompt, params(6), row, sample)
    fake.assert_all_free()


def test_a_prefix_published_by_an_interrupted_step_is_never_served() -> None:
    fake = make_fake(num_blocks=128, max_batch_tokens=512)
    fake.runner.failures.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        list(fake.engine.generate([prompt_ids(40)], params(4)))
    fake.assert_all_free()
    fake.runner.states = [[None] * 4 for _ in fake.runner.states]
    (completion,) = fake.engine.generate([prompt_ids(40)], params(4))
    assert completion.cached_tokens == 0
    assert completion.samples[0].token_ids == expected_ids(prompt_ids(40), params(4), 0)


class Poison(BaseException):
    """Only to tell which row a test means."""


def poison(fake: Fake, row: int) -> None:
    """Make every step fail in which the row takes part."""
    execute = fake.runner.execute

    def failing(batch: object) -> torch.Tensor:
        chunks = batch.chunks  # type: ignore[attr-defined]
        if any(chunk.sequence.group.row == row for chunk in chunks):
            raise torch.OutOfMemoryError("too long")
        return execute(batch)  # type: ignore[arg-type]

    fake.engine._runner = type("Poisoned", (), {"execute": staticmethod(failing)})()


@pytest.mark.case(53)
@pytest.mark.parametrize("n", [1, 3])
def test_a_row_that_fails_alone_is_a_row_error_and_its_neighbours_finish(n: int) -> None:
    fake = make_fake(max_batch_tokens=16, max_sequences=8)
    poison(fake, 3)
    completions = run(fake, [prompt_ids(9, row) for row in range(6)], params(5, n=n))
    for row, completion in enumerate(completions):
        if row == 3:
            assert completion.error is not None
            assert completion.error.code == "out_of_memory"
            assert [sample.finish_reason for sample in completion.samples] == [None] * n
        else:
            assert completion.error is None
            for sample, drawn in enumerate(completion.samples):
                assert drawn.token_ids == expected_ids(prompt_ids(9, row), params(5), row, sample)


def test_a_row_that_fails_alone_does_not_slow_down_the_rest() -> None:
    fake = make_fake(max_batch_tokens=16, max_sequences=8)
    poison(fake, 0)
    run(fake, [prompt_ids(9, row) for row in range(6)], params(5))
    assert fake.scheduler.max_batch_tokens == 16
    assert fake.scheduler.max_sequences == 8


def test_the_watchdog_names_the_sequences_that_wait() -> None:
    fake = make_fake(num_blocks=8)
    fake.engine.add(Prompt(token_ids=prompt_ids(6), row=0), params(5))
    # A leak: all blocks but one have an owner that nobody knows.
    for _ in range(7):
        fake.pool.allocate()
    fake.scheduler._roster.fail_alone = lambda sequence: None  # type: ignore[method-assign]
    fake.scheduler._roster.blocks.enter = lambda sequence: False  # type: ignore[method-assign]
    fake.scheduler._admit = lambda batch: None  # type: ignore[method-assign]
    with pytest.raises(EngineStalled, match=r"prompt 0 sample 0 \(waiting, 0 of 6 tokens\)"):
        fake.engine.step()


def test_an_idle_engine_steps_without_complaint() -> None:
    fake = make_fake()
    assert fake.engine.step() == []
    assert fake.runner.num_steps == 0
