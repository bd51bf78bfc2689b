"""What ends a sample: eos ids, stop ids, stop strings, lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from batchgen.engine.model_loader import load_model
from batchgen.records import Sample
from batchgen.sampling_params import SamplingParams
from batchgen.tokenizer import Tokenizer
from tests.engine.forced import forced_engine, letters_tokenizer, saying
from tests.engine.running import run
from tests.engine.tiny import EOS, VOCAB_SIZE, make_tiny
from tests.tokenizers import byte_level, load, save

PROMPT = [26, 26]
SPACE, A, B, C, D, AB = 4, 5, 6, 7, 8, 29


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return letters_tokenizer(tmp_path_factory.mktemp("letters"))


def said(
    token_ids: list[int],
    params: SamplingParams,
    tokenizer: Tokenizer | None = None,
    prompt: list[int] = PROMPT,
    vocab_size: int = VOCAB_SIZE,
    **options: Any,
) -> Sample:
    """The sample of a model that says `token_ids`, then EOS for ever."""
    engine = forced_engine(saying(prompt, token_ids, vocab_size), tokenizer, vocab_size=vocab_size, **options)
    (completion,) = run(engine, [prompt], params)
    assert completion.error is None
    (sample,) = completion.samples
    return sample


def greedy(max_tokens: int | None = 10, **settings: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **settings)


@pytest.mark.case(25)
@pytest.mark.parametrize("eos", [2, 9])
def test_either_eos_of_the_list_ends_a_sample(eos: int) -> None:
    """Case 25."""
    sample = said([A, eos, B], greedy(), eos=(2, 9))
    assert (sample.token_ids, sample.finish_reason, sample.stop_reason) == ([A, eos], "stop", None)


@pytest.mark.case(25)
def test_eos_ids_are_united_from_generation_config_config_and_tokenizer(tmp_path: Path) -> None:
    """Case 25: the config says 7, generation_config.json 7 and 9, and the tokenizer's `</s>` is 1."""
    tiny = make_tiny(tmp_path, eos=7)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert load_model(tiny.directory, "float32").eos_token_ids == {1, 7, 9}
    (completion,) = run(tiny.engine(), [PROMPT], greedy(30, logit_bias={9: 50.0}))
    assert completion.samples[0].token_ids == [9]


def test_an_eos_id_beyond_the_vocabulary_does_no_harm() -> None:
    sample = said([A, B], greedy(3, min_tokens=2), eos=(EOS, 5000))
    assert sample.token_ids == [A, B, EOS]


@pytest.mark.case(26)
def test_ignore_eos_goes_on_past_all_of_them_but_not_past_stop_ids() -> None:
    """Case 26."""
    ids = [A, 2, B, 9, C]
    sample = said(ids, greedy(5, ignore_eos=True), eos=(2, 9))
    assert (sample.token_ids, sample.finish_reason) == (ids, "length")
    sample = said(ids, greedy(5, ignore_eos=True, stop_token_ids=(9,)), eos=(2, 9))
    assert (sample.token_ids, sample.finish_reason, sample.stop_reason) == ([A, 2, B, 9], "stop", 9)


def test_the_token_that_ends_a_sample_is_kept_but_not_shown(tokenizer: Tokenizer) -> None:
    for token_id, params in ((C, greedy(stop_token_ids=(C,))), (EOS, greedy())):
        sample = said([A, B, token_id, D], params, tokenizer)
        assert (sample.token_ids, sample.text) == ([A, B, token_id], "ab")
    shown = said([A, B, C, D], greedy(stop_token_ids=(C,), include_stop=True), tokenizer)
    assert (shown.text, shown.stop_reason) == ("abc", C)


@pytest.mark.case(27)
def test_a_stop_string_over_three_tokens_is_cut_out_of_the_text_alone(tokenizer: Tokenizer) -> None:
    """Case 27."""
    sample = said([D, AB, SPACE, C, D], greedy(stop=("ab c",)), tokenizer)
    assert (sample.text, sample.stop_reason, sample.finish_reason) == ("d", "ab c", "stop")
    assert sample.token_ids == [D, AB, SPACE, C]
    shown = said([D, AB, SPACE, C, D], greedy(stop=("ab c",), include_stop=True), tokenizer)
    assert shown.text == "dab c"


def test_a_stop_string_may_begin_and_end_inside_tokens(tokenizer: Tokenizer) -> None:
    sample = said([D, AB, AB, C], greedy(stop=("ba",)), tokenizer)
    assert (sample.text, sample.token_ids) == ("da", [D, AB, AB])
    shown = said([D, AB, AB, C], greedy(stop=("ba",), include_stop=True), tokenizer)
    assert shown.text == "daba", "nothing after the stop string"


@pytest.mark.case(27)
def test_of_several_stop_strings_the_earliest_match_wins(tokenizer: Tokenizer) -> None:
    """Case 27."""
    assert said([A, B, C, D], greedy(stop=("cd", "bc", "d")), tokenizer).text == "a"
    # One token completes both: that which begins first in the text counts.
    both = said([D, AB], greedy(stop=("b", "dab")), tokenizer)
    assert (both.text, both.stop_reason) == ("", "dab")


@pytest.mark.case(27)
def test_what_the_prompt_says_never_stops_a_sample(tokenizer: Tokenizer) -> None:
    """Case 27: neither within the prompt nor over its end."""
    sample = said([C, D], greedy(stop=("ab", "bc")), tokenizer, prompt=[A, B])
    assert (sample.text, sample.stop_reason) == ("cd", None)
    again = said([C, A, B, D], greedy(stop=("ab", "bc")), tokenizer, prompt=[A, B])
    assert (again.text, again.stop_reason) == ("c", "ab")


@pytest.mark.case(27)
def test_a_stop_string_of_a_character_of_several_tokens(tmp_path: Path) -> None:
    """Case 27: four bytes, three tokens; and the same bytes elsewhere do not match half-way."""
    bytes_tokenizer = load(save(byte_level(), tmp_path, bos=False))
    token_ids = bytes_tokenizer.encode("a😁b😀c")
    size = bytes_tokenizer.vocab_size
    prompt = bytes_tokenizer.encode("p")
    sample = said(token_ids, greedy(30, stop=("😀",)), bytes_tokenizer, prompt, size, eos=(1,))
    assert (sample.text, sample.stop_reason, sample.text_complete) == ("a😁b", "😀", True)


@pytest.mark.case(17)
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4])
def test_a_character_that_is_cut_by_the_length_is_left_out_and_told(tmp_path: Path, max_tokens: int) -> None:
    """Case 17 at the engine's door: an emoji of two tokens after a letter."""
    bytes_tokenizer = load(save(byte_level(), tmp_path, bos=False))
    token_ids = bytes_tokenizer.encode("a😀")
    prompt = bytes_tokenizer.encode("p")
    sample = said(token_ids, greedy(max_tokens), bytes_tokenizer, prompt, bytes_tokenizer.vocab_size)
    whole = max_tokens >= len(token_ids)
    assert sample.text == ("a😀" if whole else "a")
    assert sample.text_complete is (whole or max_tokens == 1)
    assert sample.token_ids[: len(token_ids)] == token_ids[:max_tokens]


@pytest.mark.case(28)
def test_min_tokens_bans_eos_and_stop_ids_before_it() -> None:
    """Case 28: the model would end at 2."""
    for token_id, params in (
        (EOS, greedy(min_tokens=5)),
        (9, greedy(min_tokens=5, stop_token_ids=(9,))),
    ):
        sample = said([A, token_id, token_id, token_id, token_id, token_id], params)
        assert len(sample.token_ids) == 6
        assert token_id not in sample.token_ids[:5]
        assert (sample.token_ids[5], sample.finish_reason) == (token_id, "stop")


@pytest.mark.case(28)
def test_a_stop_string_that_ends_before_min_tokens_does_not_stop(tokenizer: Tokenizer) -> None:
    """Case 28: `abc` ends at 3 and again at 6."""
    sample = said([A, B, C, A, B, C, D], greedy(stop=("abc",), min_tokens=5), tokenizer)
    assert (sample.text, len(sample.token_ids)) == ("abc", 6)


@pytest.mark.case(31)
def test_max_tokens_0_generates_nothing_and_1_one_token(tokenizer: Tokenizer) -> None:
    """Case 31."""
    nothing = said([A, B], greedy(0), tokenizer)
    assert (nothing.token_ids, nothing.text, nothing.finish_reason) == ([], "", "length")
    one = said([A, B], greedy(1), tokenizer)
    assert (one.token_ids, one.text, one.finish_reason) == ([A], "a", "length")


def test_without_max_tokens_the_context_is_the_limit() -> None:
    sample = said([A] * 40, greedy(None), max_model_len=20)
    assert (len(sample.token_ids), sample.finish_reason) == (18, "length")


def test_stop_strings_and_bad_words_without_a_tokenizer_are_a_row_error() -> None:
    for params in (greedy(stop=("a",)), greedy(bad_words=("a",))):
        (completion,) = run(forced_engine(saying(PROMPT, [A])), [PROMPT], params)
        assert completion.error is not None
        assert completion.error.code == "no_tokenizer"


def test_token_ids_beyond_the_vocabulary_are_a_row_error_that_names_the_control() -> None:
    for params, name in (
        (greedy(logit_bias={VOCAB_SIZE: 1.0}), "logit_bias"),
        (greedy(stop_token_ids=(VOCAB_SIZE,)), "stop_token_ids"),
    ):
        (completion,) = run(forced_engine(saying(PROMPT, [A])), [PROMPT], params)
        assert completion.error is not None
        assert completion.error.code == "bad_token_id"
        assert f"sampling.{name} names token id {VOCAB_SIZE}" in completion.error.message


def test_every_sample_has_a_stop_of_its_own(tokenizer: Tokenizer) -> None:
    params = SamplingParams(n=40, max_tokens=12, seed=2, stop=("a",), ignore_eos=True)
    flat = torch.zeros(VOCAB_SIZE)
    flat[A] = 2.0
    (completion,) = run(forced_engine(lambda token_ids: flat, tokenizer), [PROMPT], params)
    lengths = {len(sample.token_ids) for sample in completion.samples if sample.stop_reason == "a"}
    assert len(lengths) > 3
    for sample in completion.samples:
        assert sample.text is not None
        assert "a" not in sample.text
