"""Each sampling control, at the engine's door: against transformers' processors, or by logits that a test decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from batchgen_kernels.sample import SampleParams, sample_reference
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from batchgen.records import Completion, PartialSample, Prompt
from batchgen.sampling_params import SamplingParams
from tests.engine.forced import LogitsOf, always, forced_engine, letters_tokenizer, uneven
from tests.engine.running import run
from tests.engine.tiny import EOS, VOCAB_SIZE

PROMPT = [7, 8, 8, 9]
A, B, C = 5, 6, 7
DRAWS = 300


def complete(
    logits_of: LogitsOf, params: SamplingParams, prompt: list[int] | Prompt = PROMPT, **options: Any
) -> Completion:
    (completion,) = run(forced_engine(logits_of, **options), [prompt], params)
    return completion


def ids_of(completion: Completion) -> list[list[int]]:
    return [sample.token_ids for sample in completion.samples]


CONTROLS: list[tuple[dict[str, Any], list[LogitsProcessor]]] = [
    ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
    ({"top_k": 5}, [TopKLogitsWarper(5)]),
    ({"top_p": 0.6}, [TopPLogitsWarper(0.6)]),
    ({"min_p": 0.2}, [MinPLogitsWarper(0.2)]),
    ({"repetition_penalty": 1.3}, [RepetitionPenaltyLogitsProcessor(1.3)]),
    ({"repetition_penalty": 0.7}, [RepetitionPenaltyLogitsProcessor(0.7)]),
    ({"logit_bias": {5: 3.0, 9: -3.0}}, [SequenceBiasLogitsProcessor([[[5], 3.0], [[9], -3.0]])]),
    (
        {"min_tokens": 1, "stop_token_ids": (11,)},
        [MinNewTokensLengthLogitsProcessor(len(PROMPT), 1, [EOS, 11], device="cpu")],
    ),
    (
        {"repetition_penalty": 1.2, "temperature": 1.4, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
        [
            RepetitionPenaltyLogitsProcessor(1.2),
            TemperatureLogitsWarper(1.4),
            TopKLogitsWarper(20),
            TopPLogitsWarper(0.8),
            MinPLogitsWarper(0.05),
        ],
    ),
]


@pytest.mark.case(24)
@pytest.mark.parametrize(("settings", "processors"), CONTROLS, ids=lambda value: str(value)[:40])
def test_a_control_draws_what_its_processor_in_transformers_leaves(
    settings: dict[str, Any], processors: list[LogitsProcessor]
) -> None:
    """300 samples, with the random numbers of their keys: equal to draws from the processed logits."""
    logits_V = uneven()
    params = SamplingParams(n=DRAWS, max_tokens=1, seed=3, **settings)
    completion = complete(always(logits_V), params, Prompt(token_ids=PROMPT, row=6))
    drawn = [sample.token_ids[0] for sample in completion.samples]
    scores = logits_V[None]
    for processor in processors:
        scores = processor(torch.tensor([PROMPT]), scores.clone())
    keys = torch.zeros(DRAWS, 5, dtype=torch.long)
    keys[:, 0], keys[:, 2], keys[:, 3] = 3, 6, torch.arange(DRAWS)
    expected = sample_reference(scores.expand(DRAWS, -1), SampleParams(), keys)
    assert drawn == expected.token_ids_R.tolist()
    assert len(set(drawn)) > 1


def test_bad_words_are_stopped_at_their_last_token_with_and_without_a_space(tmp_path: Path) -> None:
    logits_V = uneven()
    logits_V[[A, B, C]] = 6.0
    params = SamplingParams(n=DRAWS, max_tokens=3, seed=1, bad_words=("ca", "w"), ignore_eos=True)
    space = 4
    completion = complete(always(logits_V), params, [space, 12], tokenizer=letters_tokenizer(tmp_path))
    processor = NoBadWordsLogitsProcessor([[C, A], [space, C, A], [27], [space, 27]])
    for token_ids in ids_of(completion):
        for end in range(3):
            context = torch.tensor([[space, 12, *token_ids[:end]]])
            assert processor(context, torch.zeros(1, VOCAB_SIZE))[0, token_ids[end]] == 0.0
    assert any(C in token_ids[:2] for token_ids in ids_of(completion)), "no word was begun, so nothing was shown"


def test_a_bad_word_that_begins_in_a_step_without_bans_is_stopped_in_the_next(tmp_path: Path) -> None:
    logits_V = uneven()
    logits_V[A], logits_V[B] = 9.0, 8.0
    tokenizer = letters_tokenizer(tmp_path)
    completion = complete(always(logits_V), greedy(5, bad_words=("aa",)), [B, B], tokenizer=tokenizer)
    assert ids_of(completion) == [[A, B, A, B, A]]


def greedy(max_tokens: int, **settings: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **settings)


def logits_with(values: dict[int, float]) -> torch.Tensor:
    """Zeros but for some tokens."""
    logits_V = torch.zeros(VOCAB_SIZE)
    for token_id, value in values.items():
        logits_V[token_id] = value
    return logits_V


@pytest.mark.case(24)
def test_repetition_penalty_counts_the_prompt_but_presence_and_frequency_do_not() -> None:
    """Case 24: a prompt that says its word twice."""
    logits_of = always(logits_with({A: 2.0, B: 1.5, C: 1.2}))
    prompt = [A, A]
    assert ids_of(complete(logits_of, greedy(2, repetition_penalty=1.4), prompt)) == [[B, A]]
    assert ids_of(complete(logits_of, greedy(5, presence_penalty=1.0), prompt)) == [[A, B, C, A, A]]
    assert ids_of(complete(logits_of, greedy(5, frequency_penalty=0.4), prompt)) == [[A, A, B, A, C]]


def test_a_negative_logit_is_multiplied_by_the_repetition_penalty() -> None:
    logits_V = torch.full((VOCAB_SIZE,), -9.0)
    logits_V[A], logits_V[B] = -1.0, -1.1
    assert ids_of(complete(always(logits_V), greedy(2, repetition_penalty=1.2), [9])) == [[A, B]]


@pytest.mark.case(22)
def test_top_k_off_has_many_names() -> None:
    """Case 22."""
    logits_of = always(uneven())
    off = [
        ids_of(complete(logits_of, SamplingParams(n=50, max_tokens=2, seed=1, top_k=top_k)))
        for top_k in (None, 0, -1, VOCAB_SIZE, VOCAB_SIZE + 5)
    ]
    assert all(drawn == off[0] for drawn in off)
    assert len({tuple(token_ids) for token_ids in off[0]}) > 10


@pytest.mark.case(22)
@pytest.mark.parametrize("settings", [{"temperature": 0}, {"top_k": 1}, {"temperature": 1e-8}], ids=str)
def test_greedy_has_three_names_and_n_equal_copies(settings: dict[str, Any]) -> None:
    """Case 22."""
    logits_V = uneven()
    params = SamplingParams(n=4, max_tokens=3, seed=1, ignore_eos=True, **settings)
    assert ids_of(complete(always(logits_V), params)) == [[int(logits_V.argmax())] * 3] * 4


@pytest.mark.case(22)
@pytest.mark.parametrize("settings", [{"temperature": 0}, {"top_k": 1}], ids=str)
def test_greedy_takes_the_lowest_id_of_equal_logits(settings: dict[str, Any]) -> None:
    logits_of = always(logits_with({C: 3.0, B: 3.0, 30: 3.0}))
    assert ids_of(complete(logits_of, SamplingParams(max_tokens=2, **settings))) == [[B, B]]


def test_equal_logits_at_the_border_of_top_k_are_all_kept() -> None:
    logits_of = always(logits_with({A: 5.0, B: 4.0, C: 4.0}))
    params = SamplingParams(n=200, max_tokens=1, seed=1, top_k=2)
    assert {token_ids[0] for token_ids in ids_of(complete(logits_of, params))} == {A, B, C}


@pytest.mark.case(21)
def test_samples_of_a_row_differ_and_come_again() -> None:
    """Case 21: alone, among other rows, fewer or more of them, in one step or many."""
    logits_of = always(uneven())
    params = SamplingParams(n=8, max_tokens=6, seed=1, ignore_eos=True)
    first = ids_of(complete(logits_of, params))
    assert len({tuple(token_ids) for token_ids in first}) == 8
    assert ids_of(complete(logits_of, params)) == first
    assert ids_of(complete(logits_of, params, max_sequences=3)) == first
    assert ids_of(complete(logits_of, params.model_copy(update={"n": 3}))) == first[:3]
    among = run(forced_engine(logits_of), [[A], PROMPT, [B, C]], params)
    assert ids_of(among[1]) == ids_of(complete(logits_of, params, Prompt(token_ids=PROMPT, row=1)))
    assert ids_of(among[1]) != first, "row 1 has other random numbers than row 0"


@pytest.mark.case(21)
def test_samples_go_on_after_a_restart_as_if_it_had_not_been() -> None:
    """Case 21, killed and resumed: each sample had come to another length."""
    params = SamplingParams(n=4, max_tokens=6, seed=1, ignore_eos=True, logprobs=1, presence_penalty=0.5)
    whole = complete(always(uneven()), params)
    begun = [
        PartialSample(index, sample.token_ids[:kept], 0.0, (sample.logprobs or [])[:kept])
        for index, (sample, kept) in enumerate(zip(whole.samples, (2, 0, 6, 5), strict=True))
        if kept
    ]
    for partial in begun:
        partial.cumulative_logprob = sum(entries[0].logprob for entries in partial.logprobs or [])
    resumed = complete(always(uneven()), params, Prompt(token_ids=PROMPT, row=0, partial=begun))
    assert ids_of(resumed) == ids_of(whole)
    for ours, expected in zip(resumed.samples, whole.samples, strict=True):
        assert ours.logprobs == expected.logprobs
        assert ours.cumulative_logprob == pytest.approx(expected.cumulative_logprob)


def test_the_source_the_row_the_seed_and_the_position_key_the_draws() -> None:
    logits_of = always(uneven())
    params = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
    base = Prompt(token_ids=PROMPT, row=3, source=2)
    drawn = [
        ids_of(complete(logits_of, params, base)),
        ids_of(complete(logits_of, params, Prompt(token_ids=PROMPT, row=4, source=2))),
        ids_of(complete(logits_of, params, Prompt(token_ids=PROMPT, row=3, source=1))),
        ids_of(complete(logits_of, params.model_copy(update={"seed": 2}), base)),
    ]
    assert len({str(ids) for ids in drawn}) == 4
    assert len(set(drawn[0][0])) > 1


def test_an_unset_seed_is_drawn_once_and_told() -> None:
    engine = forced_engine(always(uneven()))
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    first, second = run(engine, [PROMPT, PROMPT], params)
    seed = first.samples[0].seed
    assert seed is not None
    assert second.samples[0].seed == seed
    again = run(forced_engine(always(uneven())), [PROMPT, PROMPT], params.model_copy(update={"seed": seed}))
    assert [ids_of(completion) for completion in again] == [ids_of(first), ids_of(second)]
    other = forced_engine(always(uneven()))
    assert run(other, [PROMPT], params)[0].samples[0].seed != seed


def test_draws_follow_the_distribution_of_the_processed_logits() -> None:
    """Chi-squared over 2,000 samples; the false alarm rate is below 1e-6, and the seed is fixed."""
    logits_V = uneven()
    params = SamplingParams(n=2000, max_tokens=1, seed=9, temperature=1.5, logit_bias={A: 2.0})
    completion = complete(always(logits_V), params, max_sequences=2048, max_batch_tokens=2048)
    observed_V = torch.bincount(torch.tensor([ids[0] for ids in ids_of(completion)]), minlength=VOCAB_SIZE)
    logits_V[A] += 2.0
    expected_V = (logits_V / 1.5).double().softmax(0) * 2000
    statistic = float(((observed_V - expected_V) ** 2 / expected_V).sum())
    degrees = VOCAB_SIZE - 1
    assert abs(statistic - degrees) < 6 * (2 * degrees) ** 0.5  # six standard deviations
