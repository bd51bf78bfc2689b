"""Beam search in the engine equals transformers' `generate` at batch 1: ids, order and scores."""

from __future__ import annotations

from itertools import product
from typing import Any, Literal, NamedTuple

import pytest
import torch

from batchgen.engine.engine import Engine
from batchgen.records import Completion, Prompt
from batchgen.sampling_params import BeamParams, SamplingParams
from tests.engine.running import run
from tests.engine.tiny import EOS, TinyModel, make_tiny, prompts_of

THREE_EOS = (EOS, 9, 20)
MAX_TOKENS = 12
NOT_FINISHED = -1e8
"""transformers fills up with beams of about -1e9 where it has fewer finished ones than asked for."""

Stopping = Literal[True, False, "never"]


class Case(NamedTuple):
    """One setting of the search."""

    width: int
    length_penalty: float
    early_stopping: Stopping
    eos: tuple[int, ...]


CASES = [
    Case(2, -1.0, True, (EOS,)),
    Case(2, 1.0, False, THREE_EOS),
    Case(2, 2.0, "never", THREE_EOS),
    Case(4, 0.0, "never", (EOS,)),
    Case(4, 1.0, True, THREE_EOS),
    Case(4, 2.0, False, (EOS,)),
    Case(8, -1.0, False, THREE_EOS),
    Case(8, 0.0, True, (EOS,)),
    Case(8, 1.0, "never", THREE_EOS),
    Case(8, 2.0, True, THREE_EOS),
]
"""Every value with every other one in at least one case, but for a few; the slow test has them all."""
NUM_PROMPTS = 6

Beam = tuple[list[int], float]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(tiny: TinyModel) -> Engine:
    return tiny.engine()


def params_of(case: Case, **controls: Any) -> SamplingParams:
    """Ours; the model's own eos is EOS, the others are stop ids."""
    beam = BeamParams(width=case.width, length_penalty=case.length_penalty, early_stopping=case.early_stopping)
    settings: dict[str, Any] = {"max_tokens": MAX_TOKENS, "stop_token_ids": case.eos[1:], **controls}
    return SamplingParams(beam=beam, **settings)


def reference(tiny: TinyModel, prompt: list[int], case: Case, **controls: Any) -> list[Beam]:
    """What transformers finds, best first."""
    found = tiny.eager.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=case.width,
        num_return_sequences=case.width,
        length_penalty=case.length_penalty,
        early_stopping=case.early_stopping,
        eos_token_id=list(case.eos),
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **{"max_new_tokens": MAX_TOKENS, **controls},
    )
    lengths = (found.beam_indices >= 0).sum(1).tolist()
    beams = [
        (sequence[len(prompt) : len(prompt) + length].tolist(), score)
        for sequence, length, score in zip(found.sequences, lengths, found.sequences_scores.tolist(), strict=True)
    ]
    return [beam for beam in beams if beam[1] > NOT_FINISHED]


def beams_of(completion: Completion) -> list[Beam]:
    assert completion.error is None
    beams = []
    for sample in completion.samples:
        assert sample.score is not None
        beams.append((sample.token_ids, sample.score))
    return beams


def assert_equal(ours: list[Beam], theirs: list[Beam]) -> None:
    """The same ids in the same order; scores to 1e-4, relative where a negative penalty multiplies them."""
    assert [ids for ids, _ in ours] == [ids for ids, _ in theirs]
    for (_, our_score), (_, their_score) in zip(ours, theirs, strict=True):
        assert abs(our_score - their_score) < 1e-4 * max(1.0, abs(their_score))


def compare(tiny: TinyModel, engine: Engine, prompts: list[list[int]], case: Case) -> None:
    for prompt, completion in zip(prompts, run(engine, prompts, params_of(case)), strict=True):
        assert_equal(beams_of(completion), reference(tiny, prompt, case))


@pytest.mark.case(32)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_beams_equal_transformers(tiny: TinyModel, engine: Engine, case: Case) -> None:
    """Case 32, on a few of the prompts and settings."""
    compare(tiny, engine, prompts_of(NUM_PROMPTS), case)


@pytest.mark.case(32)
@pytest.mark.slow
@pytest.mark.parametrize("eos", [(EOS,), THREE_EOS], ids=["one eos", "three eos"])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_beams_equal_transformers_over_all_settings_and_prompts(
    tiny: TinyModel, engine: Engine, width: int, eos: tuple[int, ...]
) -> None:
    """Case 32."""
    stopping: tuple[Stopping, ...] = (True, False, "never")
    for penalty, early in product((-1.0, 0.0, 1.0, 2.0), stopping):
        compare(tiny, engine, prompts_of(50), Case(width, penalty, early, eos))


def test_the_cases_end_both_ways(engine: Engine) -> None:
    """Else the comparisons would show little: beams must end by eos, early and late, and by length."""
    lengths: set[int] = set()
    reasons: set[str | None] = set()
    for case in CASES[::3]:
        for completion in run(engine, prompts_of(NUM_PROMPTS), params_of(case)):
            lengths.update(len(sample.token_ids) for sample in completion.samples)
            reasons.update(sample.finish_reason for sample in completion.samples)
    assert reasons == {"stop", "length"}
    assert {1, 2, 5, 8, MAX_TOKENS} <= lengths


CONTROLS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
    ({"repetition_penalty": 0.8, "min_tokens": 4}, {"repetition_penalty": 0.8, "min_new_tokens": 4}),
    ({"logit_bias": {9: 1.5, 12: -2.0}}, {"sequence_bias": [[[9], 1.5], [[12], -2.0]]}),
    ({"bad_words": ("d", "ab")}, {"bad_words_ids": [[8], [29], [4, 8], [4, 29]]}),
    ({"max_tokens": 1}, {"max_new_tokens": 1}),
]
"""Ours, transformers'."""


@pytest.mark.parametrize(("ours", "theirs"), CONTROLS, ids=lambda controls: next(iter(controls)))
def test_processors_act_on_log_probabilities_as_in_transformers(
    tiny: TinyModel, engine: Engine, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    case = Case(4, 1.0, "never", THREE_EOS)
    prompts = prompts_of(5)
    for prompt, completion in zip(prompts, run(engine, prompts, params_of(case, **ours)), strict=True):
        assert_equal(beams_of(completion), reference(tiny, prompt, case, **theirs))


@pytest.mark.case(33)
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_beams_with_stop_strings_equal_transformers(tiny: TinyModel, engine: Engine, early_stopping: Stopping) -> None:
    case = Case(4, 1.0, early_stopping, (EOS,))
    stop = ("rrr", "uh", "jo", "kk", "qk", "m", "o a")
    # In transformers the prompt can be part of a match; these end with a `v`, which is in none.
    prompts = [[*prompt, 26] for prompt in prompts_of(5)]
    completions = run(engine, prompts, params_of(case, stop=stop))
    for prompt, completion in zip(prompts, completions, strict=True):
        expected = reference(tiny, prompt, case, stop_strings=list(stop), tokenizer=tiny.tokenizer)
        assert_equal(beams_of(completion), expected)
    stopped = [sample for completion in completions for sample in completion.samples if sample.stop_reason in stop]
    assert len(stopped) >= 5
    for sample in stopped:
        assert sample.finish_reason == "stop"
        assert sample.text is not None
        assert not any(string in sample.text for string in stop)


@pytest.mark.case(33)
def test_a_search_that_a_stop_string_hits_ends(engine: Engine) -> None:
    """Case 33: beams of 2, at most 10 tokens, `##` as the most likely token."""
    params = SamplingParams(
        beam=BeamParams(width=2), max_tokens=10, stop=("###",), logit_bias={30: 9.0}, include_stop=True
    )
    (completion,) = run(engine, [[7, 8, 9]], params)
    best = completion.samples[0]
    assert (best.token_ids, best.text, best.stop_reason) == ([30, 30], "###", "###")
    assert best.score is not None


@pytest.mark.parametrize("eos", [(1,), (1, 3, 5)], ids=["one eos", "three eos"])
def test_as_many_beams_as_tokens(tmp_path_factory: pytest.TempPathFactory, eos: tuple[int, ...]) -> None:
    """Width 8 over a vocabulary of 8: the first step has fewer continuations than candidates are asked for."""
    small = make_tiny(tmp_path_factory.mktemp("small"), vocab_size=8)
    with_eight = small.engine()
    for penalty, early_stopping in ((1.0, False), (-1.0, "never"), (0.0, True)):
        compare(small, with_eight, prompts_of(4, 8, 0), Case(8, penalty, early_stopping, eos))


def test_preempted_searches_begin_anew_and_find_the_same(tiny: TinyModel, engine: Engine) -> None:
    case = Case(4, 1.0, "never", THREE_EOS)
    prompts = prompts_of(8)
    expected = run(engine, prompts, params_of(case))
    crowded = tiny.engine(num_blocks=32)
    actual = run(crowded, prompts, params_of(case))
    assert crowded.metrics.num_preemptions > 0
    assert [completion.samples for completion in actual] == [completion.samples for completion in expected]


def test_searches_beside_samples_find_the_same(engine: Engine) -> None:
    searched, sampled = params_of(CASES[4]), SamplingParams(n=3, max_tokens=9, seed=4)
    prompts = prompts_of(6)
    alone = [run(engine, prompts, params) for params in (searched, sampled)]
    both = [Prompt(token_ids=prompt, row=row) for row, prompt in enumerate(prompts) for _ in alone]
    together = run(engine, both, [searched, sampled] * len(prompts))
    for kind in (0, 1):
        assert [each.samples for each in together[kind::2]] == [each.samples for each in alone[kind]]


def test_beams_are_distinct(engine: Engine) -> None:
    for case in CASES[:4]:
        for completion in run(engine, prompts_of(NUM_PROMPTS), params_of(case)):
            beams = [tuple(sample.token_ids) for sample in completion.samples]
            assert len(beams) == len(set(beams)) == case.width


def test_num_return_takes_the_best(engine: Engine) -> None:
    prompts = prompts_of(3)
    params = params_of(CASES[4])
    assert params.beam is not None
    fewer = params.model_copy(update={"beam": params.beam.model_copy(update={"num_return": 2})})
    for all_beams, two in zip(run(engine, prompts, params), run(engine, prompts, fewer), strict=True):
        assert two.samples == all_beams.samples[:2]


def test_log_probabilities_of_beams_are_those_of_their_own_tokens(tiny: TinyModel, engine: Engine) -> None:
    params = params_of(CASES[4], logprobs=2, repetition_penalty=1.2)
    for prompt, completion in zip(prompts_of(4), run(engine, prompts_of(4), params), strict=True):
        for sample in completion.samples:
            raw_TV = tiny.logits([*prompt, *sample.token_ids])[len(prompt) - 1 : -1].log_softmax(-1)
            assert sample.logprobs is not None
            assert len(sample.logprobs) == len(sample.token_ids)
            for token_id, raw_V, entries in zip(sample.token_ids, raw_TV, sample.logprobs, strict=True):
                assert entries[0].token_id == token_id
                assert entries[0].rank == 1 + int((raw_V > raw_V[token_id]).sum())
                assert abs(entries[0].logprob - float(raw_V[token_id])) < 1e-4
                others = [other for other in raw_V.topk(2).indices.tolist() if other != token_id]
                assert [entry.token_id for entry in entries[1:]] == others
            total = sum(entries[0].logprob for entries in sample.logprobs)
            assert abs(sample.cumulative_logprob - total) < 1e-4


def test_without_penalties_the_score_is_the_mean_log_probability(engine: Engine) -> None:
    for completion in run(engine, prompts_of(3), params_of(Case(4, 1.0, False, (EOS,)))):
        for sample in completion.samples:
            assert sample.score == pytest.approx(sample.cumulative_logprob / len(sample.token_ids), abs=1e-5)


def test_a_prompt_whose_every_continuation_is_banned_is_an_error(engine: Engine) -> None:
    unlikely = SamplingParams(beam=BeamParams(width=2), max_tokens=3, logit_bias=dict.fromkeys(range(32), -1e30))
    (completion,) = run(engine, [[7, 8]], unlikely)
    assert completion.error is None  # Unlikely is not banned.
    every_id = SamplingParams(beam=BeamParams(width=2), max_tokens=3, min_tokens=1, stop_token_ids=tuple(range(32)))
    (completion,) = run(engine, [[7, 8]], every_id)
    assert completion.error is not None
    assert (completion.error.code, completion.samples) == ("no_allowed_token", [])
