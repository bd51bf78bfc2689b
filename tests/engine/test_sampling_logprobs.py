"""Log-probabilities of generated and of prompt tokens, and rows that have no token to draw."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from batchgen.records import Completion, PartialSample, Prompt, TokenLogprob
from batchgen.sampling_params import SamplingParams
from tests.engine.forced import LogitsOf, always, forced_engine, uneven
from tests.engine.running import run
from tests.engine.tiny import EOS, VOCAB_SIZE

PROMPT = [7, 8, 8, 9, 10, 11, 12]
A, B = 5, 6


def by_context(token_ids: list[int]) -> torch.Tensor:
    """Other logits after every text."""
    return uneven(hash(tuple(token_ids)) % 2**31)


def complete(logits_of: LogitsOf, params: SamplingParams, prompt: Prompt | None = None, **options: Any) -> Completion:
    engine = forced_engine(logits_of, **options)
    (completion,) = run(engine, [prompt or Prompt(token_ids=PROMPT, row=0)], params)
    return completion


def expected_entries(logits_V: torch.Tensor, token_id: int, top: int) -> list[TokenLogprob]:
    """The given token, then the `top` most likely others, by a sort of the raw log-probabilities."""
    logprobs = logits_V.double().log_softmax(0).tolist()
    order = sorted(range(len(logprobs)), key=lambda other: (-logprobs[other], other))
    entries = [TokenLogprob(other, logprobs[other], order.index(other) + 1) for other in order]
    return [entries[order.index(token_id)], *(entry for entry in entries[:top] if entry.token_id != token_id)]


def assert_entries(actual: list[TokenLogprob] | None, expected: list[TokenLogprob]) -> None:
    assert actual is not None
    assert [(entry.token_id, entry.rank) for entry in actual] == [(entry.token_id, entry.rank) for entry in expected]
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)


@pytest.mark.case(29)
@pytest.mark.parametrize("top", [0, 1, 2, VOCAB_SIZE, VOCAB_SIZE + 9])
def test_log_probabilities_are_raw_and_the_drawn_token_is_first_with_its_true_rank(top: int) -> None:
    """Case 29: before temperature, penalties and filters."""
    params = SamplingParams(
        n=3, max_tokens=8, seed=1, ignore_eos=True, logprobs=top, temperature=0.5, top_k=9, presence_penalty=1.0
    )
    ranks = set()
    for sample in complete(by_context, params).samples:
        assert sample.logprobs is not None
        assert len(sample.logprobs) == len(sample.token_ids)
        for position, (token_id, entries) in enumerate(zip(sample.token_ids, sample.logprobs, strict=True)):
            expected = expected_entries(by_context([*PROMPT, *sample.token_ids[:position]]), token_id, top)
            assert_entries(entries, expected)
            ranks.add(entries[0].rank)
        total = sum(entries[0].logprob for entries in sample.logprobs)
        assert sample.cumulative_logprob == pytest.approx(total, abs=1e-5)
    assert max(ranks) > 2, "every drawn token was among the two most likely: nothing was shown"


@pytest.mark.case(29)
def test_top_k_1_with_two_log_probabilities() -> None:
    """Case 29, as reported: temperature 0.5 and top_k 1 change nothing in what is told."""
    params = SamplingParams(max_tokens=1, logprobs=2, temperature=0.5, top_k=1)
    sample = complete(always(uneven()), params).samples[0]
    assert sample.logprobs is not None
    best = int(uneven().argmax())
    assert_entries(sample.logprobs[0], expected_entries(uneven(), best, 2))
    assert [entry.rank for entry in sample.logprobs[0]] == [1, 2]


def test_rows_without_logprobs_beside_rows_with_them() -> None:
    engine = forced_engine(by_context)
    settings = {"max_tokens": 4, "seed": 1, "ignore_eos": True}
    params = [SamplingParams(logprobs=top, **settings) for top in (None, 3, None, 0, 1)]
    samples = [each.samples[0] for each in run(engine, [Prompt(token_ids=PROMPT, row=0)] * 5, params)]
    assert len({tuple(sample.token_ids) for sample in samples}) == 1
    assert [sample.logprobs is None for sample in samples] == [True, False, True, False, False]
    for sample, longest in zip(samples, (0, 4, 0, 1, 2), strict=True):
        assert all(1 <= len(entries) <= longest for entries in sample.logprobs or ())


@pytest.mark.case(30)
def test_a_banned_token_is_told_with_its_raw_log_probability() -> None:
    """Case 30: it cannot be drawn, but it is still the most likely one."""
    best = int(uneven().argmax())
    params = SamplingParams(max_tokens=1, seed=1, logprobs=5, min_tokens=1, stop_token_ids=(best,))
    sample = complete(always(uneven()), params).samples[0]
    assert sample.token_ids != [best]
    assert sample.logprobs is not None
    assert_entries(sample.logprobs[0], expected_entries(uneven(), sample.token_ids[0], 5))
    assert sample.logprobs[0][1].token_id == best


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize(("max_batch_tokens", "top"), [(1024, 0), (3, 2), (1, 5)])
def test_prompt_log_probabilities_are_those_of_the_tokens_that_follow(
    max_tokens: int, max_batch_tokens: int, top: int
) -> None:
    """Case 31, whole or in chunks; the first token has none."""
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=top, seed=1, temperature=0.3)
    completion = complete(by_context, params, max_batch_tokens=max_batch_tokens)
    assert completion.prompt_logprobs is not None
    assert len(completion.prompt_logprobs) == len(PROMPT)
    assert completion.prompt_logprobs[0] is None
    for position in range(1, len(PROMPT)):
        expected = expected_entries(by_context(PROMPT[:position]), PROMPT[position], top)
        assert_entries(completion.prompt_logprobs[position], expected)
    sample = completion.samples[0]
    assert len(sample.token_ids) == max_tokens
    assert sample.finish_reason == "length" or sample.token_ids == [EOS]


def test_equal_prompts_are_scored_each_though_their_blocks_are_cached() -> None:
    params = SamplingParams(max_tokens=2, prompt_logprobs=1, seed=1)
    completions = run(forced_engine(by_context), [PROMPT, PROMPT, PROMPT], params)
    assert all(completion.prompt_logprobs == completions[0].prompt_logprobs for completion in completions)
    assert completions[0].prompt_logprobs is not None
    assert all(completions[0].prompt_logprobs[1:])


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    for max_tokens in (0, 2):
        params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=1, seed=1, ignore_eos=True)
        completion = complete(by_context, params, Prompt(token_ids=[A], row=0))
        assert completion.prompt_logprobs == [None]
        assert len(completion.samples[0].token_ids) == max_tokens


@pytest.mark.parametrize("finished", [(0,), (0, 1), (0, 1, 2)])
def test_a_resumed_row_scores_its_prompt_though_its_first_samples_are_finished(finished: tuple[int, ...]) -> None:
    params = SamplingParams(n=3, max_tokens=4, seed=1, ignore_eos=True, prompt_logprobs=1)
    whole = complete(by_context, params)
    begun = [PartialSample(index, whole.samples[index].token_ids) for index in finished]
    resumed = complete(by_context, params, Prompt(token_ids=PROMPT, row=0, partial=begun))
    assert resumed.prompt_logprobs == whole.prompt_logprobs
    assert [sample.token_ids for sample in resumed.samples] == [sample.token_ids for sample in whole.samples]


def nowhere_after(token_id: int, logits_V: torch.Tensor) -> LogitsOf:
    """A model whose logits are not finite once it has said a token."""

    def logits_of(token_ids: list[int]) -> torch.Tensor:
        return torch.full((VOCAB_SIZE,), torch.nan) if token_id in token_ids else logits_V

    return logits_of


EVERY_ID = tuple(range(VOCAB_SIZE))


@pytest.mark.parametrize(
    ("logits_of", "settings"),
    [
        (always(uneven()), {"min_tokens": 1, "stop_token_ids": EVERY_ID}),
        (always(torch.full((VOCAB_SIZE,), torch.nan)), {}),
        (always(torch.full((VOCAB_SIZE,), -torch.inf)), {"temperature": 0}),
        (always(torch.full((VOCAB_SIZE,), torch.inf)), {"top_p": 0.5}),
    ],
    ids=["all banned", "nan", "all -inf", "inf"],
)
def test_a_row_without_an_allowed_token_is_an_error_and_never_nan(
    logits_of: LogitsOf, settings: dict[str, Any]
) -> None:
    params = SamplingParams(n=2, max_tokens=3, seed=1, logprobs=2, **settings)
    completion = complete(logits_of, params)
    assert completion.error is not None
    assert completion.error.code == "no_allowed_token"
    for sample in completion.samples:
        assert (sample.token_ids, sample.text, sample.finish_reason) == ([], None, None)
        assert sample.cumulative_logprob == 0.0


def test_a_row_without_an_allowed_token_does_not_harm_its_neighbours() -> None:
    good = SamplingParams(max_tokens=3, seed=1, ignore_eos=True)
    engine = forced_engine(nowhere_after(31, uneven()))
    bad, other = run(engine, [[31, A], PROMPT], good)
    assert bad.error is not None
    assert other.error is None
    assert other.samples == run(forced_engine(always(uneven())), [[31, A], PROMPT], good)[1].samples


def test_the_samples_that_did_not_fail_keep_their_texts() -> None:
    logits_V = torch.full((VOCAB_SIZE,), -9.0)
    logits_V[A] = logits_V[B] = 5.0
    params = SamplingParams(n=16, max_tokens=2, seed=1, ignore_eos=True)
    completion = complete(nowhere_after(A, logits_V), params)
    assert completion.error is not None
    kept = [sample.token_ids for sample in completion.samples if sample.finish_reason is not None]
    assert 0 < len(kept) < 16
    assert all(token_ids in ([B, B], [B, A]) for token_ids in kept)


def test_best_of_returns_the_samples_of_the_highest_mean_log_probability() -> None:
    drawn = complete(by_context, SamplingParams(n=7, max_tokens=6, seed=1)).samples
    best = complete(by_context, SamplingParams(n=3, best_of=7, max_tokens=6, seed=1)).samples
    means = sorted((sample.cumulative_logprob / len(sample.token_ids) for sample in drawn), reverse=True)
    assert [sample.cumulative_logprob / len(sample.token_ids) for sample in best] == means[:3]
    assert all(sample in drawn for sample in best)


def test_a_sample_that_failed_is_not_among_the_best() -> None:
    logits_V = torch.full((VOCAB_SIZE,), -9.0)
    logits_V[A] = logits_V[B] = 5.0
    params = SamplingParams(n=2, best_of=16, max_tokens=2, seed=1, ignore_eos=True)
    completion = complete(nowhere_after(A, logits_V), params)
    assert completion.error is not None
    assert all(sample.finish_reason is not None for sample in completion.samples)
