"""From a prompt to its sequence group, or to the reason why there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchgen.engine.requests import RequestBuilder, RequestRefused
from batchgen.engine.sequence import Status
from batchgen.records import PartialSample, Prompt
from batchgen.sampling_params import BeamParams, SamplingParams
from tests.engine.forced import letters_tokenizer
from tests.engine.tiny import EOS, VOCAB_SIZE

MAX_MODEL_LEN = 16
SEED = 77
PROMPT = [5, 6, 7]


def builder(directory: Path | None = None) -> RequestBuilder:
    return RequestBuilder(
        tokenizer=None if directory is None else letters_tokenizer(directory),
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=frozenset({EOS, 2, VOCAB_SIZE + 5}),
        default_seed=SEED,
    )


def prompt(ids: list[int] = PROMPT, **fields: Any) -> Prompt:
    return Prompt(token_ids=ids, **fields)


def refusal(asked: Prompt, directory: Path | None = None, **params: Any) -> tuple[str, str]:
    with pytest.raises(RequestRefused) as caught:
        builder(directory).build(0, asked, SamplingParams(**params))
    return caught.value.error


def test_text_is_tokenized_and_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    build = builder(tmp_path).build
    assert build(0, Prompt(text="abd"), SamplingParams()).prompt_token_ids.tolist() == [29, 8]
    assert build(0, Prompt(text="abd", token_ids=[9]), SamplingParams()).prompt_token_ids.tolist() == [9]


@pytest.mark.parametrize(
    ("asked", "code", "message"),
    [
        (Prompt(), "null_prompt", "neither text nor token ids"),
        (Prompt(text="a"), "no_tokenizer", "give the prompt as token ids"),
        (Prompt(token_ids=[]), "empty_prompt", "no tokens"),
        (Prompt(token_ids=[5, VOCAB_SIZE]), "bad_token_id", f"token id {VOCAB_SIZE} is outside the vocabulary of 32"),
        (Prompt(token_ids=[-1]), "bad_token_id", "token id -1 is outside"),
        (Prompt(token_ids=[5] * 16), "prompt_too_long", "16 tokens, and the model's context of 16 no room"),
    ],
)
def test_a_prompt_that_cannot_run_says_why(asked: Prompt, code: str, message: str) -> None:
    error = refusal(asked)
    assert error[0] == code
    assert message in error[1]


def test_half_a_character_is_that_prompts_error(tmp_path: Path) -> None:
    assert refusal(Prompt(text="ab\ud83d"), tmp_path) == (
        "invalid_utf8",
        "character 2 of the prompt is half of a surrogate pair, which is no character",
    )


@pytest.mark.parametrize("settings", [{"stop": ("a",)}, {"bad_words": ("a",)}])
def test_controls_on_text_need_a_tokenizer(settings: dict[str, Any]) -> None:
    assert refusal(prompt(), **settings)[0] == "no_tokenizer"


@pytest.mark.parametrize("settings", [{"logit_bias": {VOCAB_SIZE: 1.0}}, {"stop_token_ids": (VOCAB_SIZE,)}])
def test_controls_on_ids_need_ids_of_the_vocabulary(settings: dict[str, Any]) -> None:
    code, message = refusal(prompt(), **settings)
    assert code == "bad_token_id"
    assert message.startswith(f"sampling.{next(iter(settings))} names token id {VOCAB_SIZE}")


@pytest.mark.parametrize(
    ("max_tokens", "length", "expected"), [(None, 3, 13), (5, 3, 5), (50, 3, 13), (0, 16, 0), (None, 15, 1)]
)
def test_max_tokens_is_at_most_what_the_context_leaves(max_tokens: int | None, length: int, expected: int) -> None:
    group = builder().build(0, prompt([5] * length), SamplingParams(max_tokens=max_tokens))
    assert group.max_tokens == expected


def test_the_row_is_the_place_in_the_call_unless_it_is_given() -> None:
    build = builder().build
    assert build(4, prompt(), SamplingParams()).row == 4
    group = build(4, prompt(source=2, row=9), SamplingParams(seed=3))
    assert (group.source, group.row, group.seed) == (2, 9, 3)


def test_a_seed_that_is_not_given_is_the_engines() -> None:
    assert builder().build(0, prompt(), SamplingParams()).seed == SEED
    assert builder().build(0, prompt(), SamplingParams(seed=0)).seed == 0


def test_ids_that_end_a_sample() -> None:
    build = builder().build
    # A config may name an id that the model has no logits for.
    assert build(0, prompt(), SamplingParams()).stop_token_ids == {EOS, 2}
    assert build(0, prompt(), SamplingParams(stop_token_ids=(9,))).stop_token_ids == {EOS, 2, 9}
    assert build(0, prompt(), SamplingParams(stop_token_ids=(9,), ignore_eos=True)).stop_token_ids == {9}


def test_rows_that_share_their_parameters_share_what_these_come_to() -> None:
    requests = builder()
    params = SamplingParams(logit_bias={5: 1.0})
    first, second = (requests.build(index, prompt(), params) for index in range(2))
    assert first.edits is second.edits
    other = requests.build(2, prompt(), SamplingParams(logit_bias={6: 1.0}))
    assert other.edits.bias_of(other.sequences[0]).token_ids.tolist() == [6]


def test_samples_are_born_when_the_prompt_is_computed() -> None:
    group = builder().build(0, prompt(), SamplingParams(n=2, best_of=3))
    assert [sequence.status for sequence in group.sequences] == [Status.WAITING, Status.UNBORN, Status.UNBORN]
    assert (group.has_unborn, group.num_unfinished) == (True, 3)


def test_a_search_begins_with_one_beam_and_forgets_what_was_begun() -> None:
    partial = [PartialSample(0, [8, 9])]
    group = builder().build(0, prompt(partial=partial), SamplingParams(beam=BeamParams(width=4)))
    assert group.search is not None
    assert [sequence.num_generated for sequence in group.sequences] == [0]


def test_nothing_to_generate_and_nothing_to_score_is_finished_at_once() -> None:
    group = builder().build(0, prompt(), SamplingParams(max_tokens=0, n=2))
    assert group.num_unfinished == 0
    scored = builder().build(0, prompt(), SamplingParams(max_tokens=0, n=2, prompt_logprobs=1))
    assert scored.num_unfinished == 1
    assert scored.prompt_logprobs == [None] * 3


def test_samples_that_were_begun_go_on_each_from_where_it_was() -> None:
    partial = [PartialSample(1, [8, 9], -1.5), PartialSample(2, [8, EOS], -0.5)]
    group = builder().build(0, prompt(partial=partial), SamplingParams(n=3))
    assert [sequence.generated_token_ids for sequence in group.sequences] == [[], [8, 9], [8, EOS]]
    assert [sequence.status for sequence in group.sequences] == [Status.WAITING, Status.WAITING, Status.FINISHED]
    assert [sequence.cumulative_logprob for sequence in group.sequences] == [0.0, -1.5, -0.5]
    assert (group.has_unborn, group.num_unfinished) == (False, 2)
