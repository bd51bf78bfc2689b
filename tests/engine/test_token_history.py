from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from batchgen.engine.token_history import TokenHistory

tokens = st.lists(st.integers(0, 400), max_size=300)


def contents(history: TokenHistory) -> dict[int, int]:
    assert len(set(history.token_ids.tolist())) == len(history.token_ids)
    return dict(zip(history.token_ids.tolist(), history.output_counts.tolist(), strict=True))


def expected(prompt: list[int], output: list[int]) -> dict[int, int]:
    return {token_id: Counter(output)[token_id] for token_id in (*prompt, *output)}


@given(tokens, tokens)
def test_it_holds_each_token_once_and_counts_the_generated_ones(prompt: list[int], output: list[int]) -> None:
    history = TokenHistory(prompt)
    for token_id in output:
        history.append(token_id)
    assert contents(history) == expected(prompt, output)


def test_it_grows_while_it_counts() -> None:
    """At 64 distinct tokens, 128, 256 and so on the arrays are replaced."""
    history = TokenHistory(range(60))
    for token_id in range(50, 700):
        history.append(token_id)
    assert contents(history) == expected(list(range(60)), list(range(50, 700)))


@given(tokens, tokens, tokens)
def test_a_fork_goes_its_own_way(prompt: list[int], first: list[int], second: list[int]) -> None:
    history = TokenHistory(prompt)
    twin = history.fork()
    for token_id in first:
        history.append(token_id)
    for token_id in second:
        twin.append(token_id)
    assert contents(history) == expected(prompt, first)
    assert contents(twin) == expected(prompt, second)
