from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.stop_strings import StopMatch, StopStringMatcher
from batchgen.tokenizer import Tokenizer
from tests.tokenizers import KINDS, byte_level, load, save, sentence_piece


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(save(byte_level(), tmp_path_factory.mktemp("tokenizer"), bos=False))


def run(tokenizer: Tokenizer, stop: tuple[str, ...], prompt: str, text: str, min_tokens: int = 0) -> StopMatch | None:
    matcher = StopStringMatcher(tokenizer, stop).start(tokenizer.encode(prompt), min_tokens)
    found = None
    for token_id in tokenizer.encode(text):
        found = found or matcher.append(token_id)
    return found


def test_a_stop_string_over_three_tokens_is_cut_out(tokenizer: Tokenizer) -> None:
    match = run(tokenizer, ("ab c",), "p", "xyab cz")
    assert match == StopMatch("ab c", "xy", 6)


def test_without_a_match_nothing_stops(tokenizer: Tokenizer) -> None:
    assert run(tokenizer, ("ab c",), "p", "abc ab  c a b c") is None


def test_the_earliest_match_in_the_text_wins(tokenizer: Tokenizer) -> None:
    # " w" and "or" are tokens: one step brings both matches.
    match = run(tokenizer, ("w", " w"), "p", "a world")
    assert match == StopMatch(" w", "a", 2)
    assert run(tokenizer, ("longer one", "er"), "p", "a longer one") == StopMatch("er", "a long", 8)


def test_the_shorter_one_of_two_that_begin_together_wins(tokenizer: Tokenizer) -> None:
    assert run(tokenizer, ("orb", "o", "or"), "p", "for") == StopMatch("o", "f", 2)


@pytest.mark.parametrize("kind", ["byte level", "sentence piece"])
def test_a_stop_string_inside_a_character_of_several_tokens(tmp_path: Path, kind: str) -> None:
    tokenizer = load(save(KINDS[kind](), tmp_path, bos=False))
    match = run(tokenizer, ("é", "😀"), "p", "a😁b😀é")
    assert match is not None
    assert (match.stop, match.text.strip()) == ("😀", "a😁b")


def test_the_prompt_never_matches(tokenizer: Tokenizer) -> None:
    assert run(tokenizer, ("ab",), "ab", "cd") is None
    assert run(tokenizer, ("ab",), "a", "b") is None
    assert run(tokenizer, ("ab",), "a", "bab") == StopMatch("ab", "b", 3)


def test_a_stop_string_that_ends_before_min_tokens_does_not_count(tokenizer: Tokenizer) -> None:
    assert run(tokenizer, ("ab",), "p", "abcdab", min_tokens=3) == StopMatch("ab", "abcd", 6)
    assert run(tokenizer, ("ab",), "p", "abcd", min_tokens=3) is None
    assert run(tokenizer, ("ab",), "p", "ab", min_tokens=2) == StopMatch("ab", "", 2)


def test_a_leading_space_can_match(tmp_path: Path) -> None:
    tokenizer = load(save(sentence_piece(), tmp_path))
    matcher = StopStringMatcher(tokenizer, (" wor",)).start(tokenizer.encode("hello"))
    (world,) = tokenizer.encode("world")[1:]
    assert matcher.append(world) == StopMatch(" wor", "", 1)


def test_decoders_that_invent_spaces_match_too(tmp_path: Path) -> None:
    tokenizer = load(save(KINDS["word piece"](), tmp_path, bos=False))
    assert run(tokenizer, ("s st",), "hello", "worlds stop") == StopMatch("s st", " world", 3)


def test_a_character_that_the_prompt_began_belongs_to_the_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é!x")
    matcher = StopStringMatcher(tokenizer, ("x",)).start(ids[:1])
    matches = [matcher.append(token_id) for token_id in ids[1:]]
    assert matches == [None, None, StopMatch("x", "é!", 3)]


def test_forks_go_on_independently(tokenizer: Tokenizer) -> None:
    matcher = StopStringMatcher(tokenizer, ("ab",)).start([])
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    matcher.append(a)
    twin = matcher.fork()
    assert twin.append(a) is None
    assert matcher.append(b) == StopMatch("ab", "", 2)
    assert twin.append(b) == StopMatch("ab", "a", 3)


@settings(max_examples=300)
@given(
    text=st.text("ab wor\u00e9\U0001f600", max_size=12),
    stop=st.lists(st.text("ab wor\u00e9\U0001f600", min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_it_stops_at_the_first_token_that_completes_a_match(tokenizer: Tokenizer, text: str, stop: list[str]) -> None:
    ids = tokenizer.encode(text)
    expected = None
    for count in range(len(ids) + 1):
        so_far = tokenizer.decode_completion([], ids[:count])[0]
        positions = [(so_far.find(string), len(string.encode()), string) for string in stop if string in so_far]
        if positions:
            position, _, string = min(positions)
            expected = StopMatch(string, so_far[:position], count)
            break
    matcher = StopStringMatcher(tokenizer, stop).start([])
    found = next((match for token_id in ids if (match := matcher.append(token_id))), None)
    assert found == expected


def test_a_token_costs_the_same_however_long_the_text_is(tokenizer: Tokenizer) -> None:
    def seconds(count: int) -> float:
        matcher = StopStringMatcher(tokenizer, ("###",)).start([])
        ids = tokenizer.encode("lorem ipsum ") * (count // 12)
        began = time.perf_counter()
        for token_id in ids:
            matcher.append(token_id)
        return time.perf_counter() - began

    seconds(1000)
    # Quadratic work would be 40 times as slow per token; a factor of 8 leaves room for a busy machine.
    assert seconds(80_000) / 40 < 8 * seconds(2000)
