from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any, cast

import pytest

from batchgen.engine import engine as engine_module
from batchgen.engine.batch import Batch
from batchgen.records import Completion, PartialSample, Prompt
from batchgen.sampling_params import SamplingParams
from tests.engine.fakes import Fake, expected_ids, make_fake, params, prompt_ids, run


def by_index(completions: Iterator[Completion]) -> list[Completion]:
    return sorted(completions, key=lambda completion: completion.prompt_index)


class Source:
    """An endless input that counts how far it was read."""

    def __init__(self) -> None:
        self.num_read = 0

    def __iter__(self) -> Iterator[list[int]]:
        for row in count():
            self.num_read += 1
            yield prompt_ids(4, row)


def test_generate_gives_one_completion_per_prompt_with_its_position() -> None:
    fake = make_fake()
    completions = by_index(fake.engine.generate([prompt_ids(3 + row, row) for row in range(9)], params(5)))
    assert [completion.prompt_index for completion in completions] == list(range(9))
    for row, completion in enumerate(completions):
        assert completion.samples[0].token_ids == expected_ids(prompt_ids(3 + row, row), params(5), row)
    fake.assert_all_free()


def test_positions_start_anew_with_every_call_and_so_do_the_random_numbers() -> None:
    fake = make_fake()
    prompts = [prompt_ids(4, row) for row in range(3)]
    first = by_index(fake.engine.generate(prompts, params(5)))
    second = by_index(fake.engine.generate(prompts, params(5)))
    assert [completion.prompt_index for completion in second] == [0, 1, 2]
    assert [completion.samples for completion in first] == [completion.samples for completion in second]


def test_generate_reads_its_source_only_as_far_as_the_window() -> None:
    fake = make_fake(window=10)
    source = Source()
    completions = fake.engine.generate(source, params(3))
    assert source.num_read == 0, "nothing happens before the first completion is asked for"
    for taken in range(1, 30):
        next(completions)
        assert source.num_read <= taken + 10
        assert fake.engine.num_unfinished <= 10
    completions.close()
    fake.assert_all_free()


def test_prompts_of_many_samples_are_fewer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "MOST_SAMPLES", 10)
    fake = make_fake(window=10)
    source = Source()
    completions = fake.engine.generate(source, params(3, n=4))
    for taken in range(1, 12):
        next(completions)
        assert source.num_read <= taken + 3
    completions.close()
    assert fake.engine.wants_prompts
    fake.engine.add(Prompt(token_ids=prompt_ids(4)), params(3, n=10))
    assert not fake.engine.wants_prompts
    while fake.engine.num_unfinished:
        fake.engine.step()
    assert fake.engine.wants_prompts
    fake.assert_all_free()


def test_generate_does_not_drain_between_prompts() -> None:
    fake = make_fake(window=16, max_sequences=8, keeps_batches=True)
    rows = (Prompt(token_ids=prompt_ids(4, row), params=params(3 + row % 9)) for row in count())
    completions = fake.engine.generate(rows)
    for _ in islice(completions, 100):
        pass
    completions.close()
    assert [len(batch.chunks) for batch in fake.runner.batches[1:]] == [8] * (len(fake.runner.batches) - 1)


def test_closing_the_generator_drops_what_is_in_flight() -> None:
    fake = make_fake()
    completions = fake.engine.generate([prompt_ids(4, row) for row in range(20)], params(9))
    next(completions)
    completions.close()
    assert fake.engine.num_unfinished == 0
    fake.assert_all_free()


def test_two_generators_of_one_engine_get_their_own_completions() -> None:
    fake = make_fake()
    prompts = [prompt_ids(4, row) for row in range(6)]
    first = fake.engine.generate(prompts, params(5))
    second = fake.engine.generate(prompts[:3], params(7))
    mixed: dict[int, list[Completion]] = {0: [], 1: []}
    live = {0: first, 1: second}
    while live:
        for name, completions in list(live.items()):
            completion = next(completions, None)
            if completion is None:
                del live[name]
            else:
                mixed[name].append(completion)
    for name, length, number in ((0, 5, 6), (1, 7, 3)):
        assert sorted(completion.prompt_index for completion in mixed[name]) == list(range(number))
        for completion in mixed[name]:
            row = completion.prompt_index
            assert completion.samples[0].token_ids == expected_ids(prompts[row], params(length), row)
    fake.assert_all_free()


def test_a_generator_that_is_closed_loses_no_completion_of_another() -> None:
    fake = make_fake()
    first = fake.engine.generate([prompt_ids(4, row) for row in range(4)], params(3))
    second = fake.engine.generate([prompt_ids(4, row) for row in range(4)], params(3))
    next(first)
    next(second)
    first.close()
    assert len(list(second)) == 3


def test_a_generator_leaves_prompts_that_were_added_by_hand_to_step() -> None:
    fake = make_fake(window=2)
    by_hand = fake.engine.add(Prompt(token_ids=prompt_ids(4, 9), row=9), params(2))
    assert len(list(fake.engine.generate([prompt_ids(4, row) for row in range(5)], params(3)))) == 5
    (completion,) = fake.engine.step()
    assert completion.prompt_index == by_hand
    assert completion.samples[0].token_ids == expected_ids(prompt_ids(4, 9), params(2), 9)


def test_params_may_be_one_for_all_or_one_per_prompt_or_stand_in_the_prompt() -> None:
    fake = make_fake()
    prompts = [prompt_ids(4, row) for row in range(3)]
    each = by_index(fake.engine.generate(prompts, [params(1), params(2), params(3)]))
    assert [len(completion.samples[0].token_ids) for completion in each] == [1, 2, 3]
    own = [Prompt(token_ids=prompt, params=params(4)) for prompt in prompts]
    assert [len(done.samples[0].token_ids) for done in fake.engine.generate(own)] == [4, 4, 4]


def test_too_few_params_are_an_error_that_says_so() -> None:
    fake = make_fake()
    with pytest.raises(ValueError, match="params has 2 entries, but there are more prompts"):
        list(fake.engine.generate([prompt_ids(4)] * 3, [params(1)] * 2))
    fake.assert_all_free()


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        (Prompt(), "null_prompt"),
        (Prompt(text="words"), "no_tokenizer"),
        (Prompt(token_ids=[]), "empty_prompt"),
        (Prompt(token_ids=[1, 97]), "bad_token_id"),
        (Prompt(token_ids=[-1]), "bad_token_id"),
        (Prompt(token_ids=[1] * 512), "prompt_too_long"),
    ],
)
def test_what_is_wrong_with_one_prompt_is_its_completions_error(prompt: Prompt, code: str) -> None:
    fake = make_fake()
    good = Prompt(token_ids=prompt_ids(4))
    completions = by_index(fake.engine.generate([good, prompt, good], params(3)))
    errors = [completion.error and completion.error.code for completion in completions]
    assert errors == [None, code, None]
    assert completions[1].samples == []
    assert [completion.prompt_index for completion in completions] == [0, 1, 2]


def test_none_among_the_prompts_is_its_own_error_and_ends_nothing() -> None:
    fake = make_fake()
    completions = by_index(fake.engine.generate([prompt_ids(3), None, prompt_ids(3)], params(2)))
    assert [each.error and each.error.code for each in completions] == [None, "null_prompt", None]
    fake.assert_all_free()


@pytest.mark.parametrize("prompts", ["text", b"ab", {"prompt": "x"}, Prompt(text="x")])
def test_one_prompt_in_place_of_many_is_refused_when_it_is_given(prompts: Any) -> None:
    with pytest.raises(TypeError, match="must be a list or another iterable of prompts"):
        make_fake().engine.generate(prompts)


@pytest.mark.parametrize("prompt", [5, b"ab", {"prompt": "x"}])
def test_what_is_no_prompt_is_named_with_its_place(prompt: Any) -> None:
    fake = make_fake()
    with pytest.raises(TypeError, match="prompt 1 must be text, a list of token ids or a Prompt"):
        list(fake.engine.generate([prompt_ids(3), prompt], params(2)))
    fake.assert_all_free()


def test_parameters_must_be_parameters() -> None:
    with pytest.raises(TypeError, match="params must be SamplingParams, or one for each prompt, got dict"):
        make_fake().engine.generate([prompt_ids(3)], cast(Any, {"n": 2}))


def test_an_engine_at_work_refuses_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = make_fake()
    fake.engine.add(Prompt(token_ids=prompt_ids(3)), params(2))
    refused: list[str] = []

    def call(work: Callable[[], object]) -> None:
        try:
            work()
        except RuntimeError as error:
            refused.append(str(error))

    def meanwhile() -> Batch:
        for work in (fake.engine.step, lambda: fake.engine.add(Prompt(token_ids=prompt_ids(3)))):
            thread = threading.Thread(target=call, args=(work,))
            thread.start()
            thread.join()
        return schedule()

    scheduler = fake.engine._scheduler
    schedule = scheduler.schedule
    monkeypatch.setattr(scheduler, "schedule", meanwhile)
    fake.engine.step()
    assert len(refused) == 2
    assert all("at work in another thread" in each for each in refused)
    monkeypatch.setattr(scheduler, "schedule", schedule)
    while fake.engine.num_unfinished:
        fake.engine.step()
    fake.assert_all_free()


def test_max_tokens_0_gives_an_empty_completion() -> None:
    fake = make_fake()
    (completion,) = run(fake, [prompt_ids(4)], params(0, n=2))
    assert [(sample.token_ids, sample.finish_reason) for sample in completion.samples] == [([], "length")] * 2
    assert completion.error is None


def test_max_tokens_is_what_the_context_leaves_where_it_is_not_given() -> None:
    fake = make_fake(num_blocks=64, max_model_len=40)
    (completion,) = run(fake, [prompt_ids(30)], SamplingParams(seed=5))
    assert len(completion.samples[0].token_ids) == 10
    assert completion.samples[0].finish_reason == "length"
    (completion,) = run(fake, [prompt_ids(30)], SamplingParams(seed=5, max_tokens=500))
    assert len(completion.samples[0].token_ids) == 10


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("num_done", [1, 4, 7, 12])
def test_a_prompt_resumed_from_its_partial_gives_the_undisturbed_result(num_done: int, n: int) -> None:
    prompts = [prompt_ids(5 + row, row) for row in range(4)]
    undisturbed = run(make_fake(eos_every=20), prompts, params(14, n=n))

    stopped = make_fake(eos_every=20)
    for row, prompt in enumerate(prompts):
        stopped.engine.add(Prompt(token_ids=prompt, row=row), params(14, n=n))
    for _ in range(num_done):
        assert stopped.engine.step() == []
    partials = dict(stopped.engine.partials())
    assert len(partials) == 4

    resumed = make_fake(eos_every=20)
    again = [Prompt(token_ids=prompt, row=row, partial=partials[row]) for row, prompt in enumerate(prompts)]
    completions = run(resumed, again, params(14, n=n))
    assert [completion.samples for completion in completions] == [completion.samples for completion in undisturbed]
    assert resumed.engine.metrics.num_generated_tokens == stopped_tokens(undisturbed)


def stopped_tokens(completions: list[Completion]) -> int:
    return sum(len(sample.token_ids) for completion in completions for sample in completion.samples)


def test_a_partial_that_had_ended_already_is_not_generated_again() -> None:
    fake = make_fake()
    whole = expected_ids(prompt_ids(5), params(6), 0)
    prompt = Prompt(token_ids=prompt_ids(5), partial=[PartialSample(0, whole, -1.5)], row=0)
    (completion,) = run(fake, [prompt], params(6))
    assert completion.samples[0].token_ids == whole
    assert completion.samples[0].cumulative_logprob == -1.5
    assert fake.runner.num_steps == 0


def test_partials_are_the_tokens_so_far_of_what_is_unfinished() -> None:
    fake = make_fake(max_sequences=2)
    for row in range(4):
        fake.engine.add(Prompt(token_ids=prompt_ids(5, row), row=row), params(9))
    for _ in range(3):
        fake.engine.step()
    partials = dict(fake.engine.partials())
    assert sorted(partials) == [0, 1], "rows that have not begun have no partial"
    assert partials[0][0].token_ids == expected_ids(prompt_ids(5, 0), params(9), 0)[:3]


def test_a_seed_of_its_own_is_drawn_once_per_engine_and_stored() -> None:
    fake = make_fake()
    open_seed = SamplingParams(max_tokens=4)
    completions = run(fake, [prompt_ids(5, row) for row in range(3)], open_seed)
    seeds = {sample.seed for completion in completions for sample in completion.samples}
    assert len(seeds) == 1
    again = make_fake()
    fixed = SamplingParams(max_tokens=4, seed=seeds.pop())
    assert [done.samples for done in run(again, [prompt_ids(5, row) for row in range(3)], fixed)] == [
        done.samples for done in completions
    ]


def test_source_and_row_key_the_random_numbers_not_the_place_in_the_batch() -> None:
    fake = make_fake()
    prompt = prompt_ids(5)
    rows = [Prompt(token_ids=prompt, source=0, row=row) for row in (3, 1, 3)]
    other = Prompt(token_ids=prompt, source=1, row=3)
    first, second, third, fourth = run(fake, [*rows, other], params(9))
    assert first.samples == third.samples
    assert first.samples != second.samples
    assert first.samples != fourth.samples


def test_metrics_count_what_was_computed_and_what_was_given() -> None:
    fake = make_fake(prefix_caching=False)
    run(fake, [prompt_ids(10, row) for row in range(4)], params(6, n=2))
    metrics = fake.engine.metrics
    assert metrics.num_prompt_tokens == 40
    assert metrics.num_generated_tokens == 48
    assert metrics.num_computed_tokens == 40 + 4 * 2 * 5
    assert metrics.num_computed_tokens == fake.runner.num_computed
    assert metrics.num_steps == fake.runner.num_steps
    assert 0 < metrics.peak_kv_share <= 1


def assert_memory_is_flat(num_rows: int, fake: Fake) -> None:
    import tracemalloc

    def rows() -> Iterator[Prompt]:
        for row in range(num_rows):
            yield Prompt(token_ids=[row % 90, row % 7, row % 13], row=row)

    tracemalloc.start()
    try:
        peaks = []
        completions = fake.engine.generate(rows(), params(3))
        for number, _ in enumerate(completions, start=1):
            if number % (num_rows // 4) == 0:
                peaks.append(tracemalloc.get_traced_memory()[1])
                tracemalloc.reset_peak()
    finally:
        tracemalloc.stop()
    assert len(peaks) == 4
    assert max(peaks[1:]) < 1.15 * peaks[0]
    fake.assert_all_free()


@pytest.mark.case(50)
def test_memory_does_not_grow_with_the_number_of_rows() -> None:
    assert_memory_is_flat(4_000, make_fake(num_blocks=512, max_sequences=128, max_batch_tokens=512, window=256))


@pytest.mark.slow
def test_hundreds_of_thousands_of_rows_take_the_memory_of_a_window() -> None:
    fake = make_fake(num_blocks=4096, max_sequences=1024, max_batch_tokens=4096, window=2048, checks_context=False)
    assert_memory_is_flat(400_000, fake)
