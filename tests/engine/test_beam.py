"""The decisions of a beam search, one step at a time."""

from __future__ import annotations

import subprocess
import sys
from array import array
from typing import Literal

import pytest

from batchgen.engine.beam import BeamSearch, Candidate, Continuation
from batchgen.engine.sequence import Sequence, SequenceGroup
from batchgen.sampling_params import BeamParams, SamplingParams

EOS = 9
STOP = 8


def search_of(
    width: int = 2,
    *,
    num_stop_ids: int = 1,
    max_tokens: int = 10,
    length_penalty: float = 1.0,
    early_stopping: Literal[True, False, "never"] = False,
) -> BeamSearch:
    beam = BeamParams(width=width, length_penalty=length_penalty, early_stopping=early_stopping)
    return BeamSearch(beam, num_stop_ids, max_tokens)


def live_beams(*beams: tuple[list[int], float], max_tokens: int = 10) -> list[Sequence]:
    """Live beams of one group, best first, as (generated ids, score)."""
    group = SequenceGroup(
        prompt_index=0,
        prompt_token_ids=array("i", [1, 2, 3]),
        params=SamplingParams(stop_token_ids=(STOP,)),
        source=0,
        row=0,
        seed=0,
        max_tokens=max_tokens,
        stop_token_ids=frozenset({EOS, STOP}),
    )
    sequences = []
    for token_ids, score in beams:
        sequence = group.new_sequence(len(sequences))
        for token_id in token_ids:
            sequence.append(token_id)
        sequence.score = sequence.cumulative_logprob = score
        sequences.append(sequence)
    return sequences


def tokens(**logprobs: float) -> list[Continuation]:
    """Continuations `t4=-0.5`: token 4 with that log-probability, raw half of it."""
    return [Continuation(int(name[1:]), logprob, logprob / 2) for name, logprob in logprobs.items()]


def ids(survivors: list[Candidate]) -> list[tuple[int, int]]:
    return [(candidate.parent, candidate.token.token_id) for candidate in survivors]


@pytest.mark.parametrize(("num_stop_ids", "expected"), [(0, 8), (1, 8), (2, 12), (3, 16)])
def test_candidates_suffice_even_if_every_beam_ends_in_every_way(num_stop_ids: int, expected: int) -> None:
    assert search_of(4, num_stop_ids=num_stop_ids).num_candidates == expected


def test_the_best_continuations_of_all_beams_live_on() -> None:
    live = live_beams(([5], -1.0), ([6], -1.5))
    survivors = search_of().advance(live, [tokens(t4=-2.0, t5=-3.0), tokens(t4=-0.1, t7=-0.2)])
    assert ids(survivors) == [(1, 4), (1, 7)]
    assert [candidate.score for candidate in survivors] == [-1.6, -1.7]


def test_equal_scores_are_ordered_by_beam_then_by_token() -> None:
    live = live_beams(([5], -1.0), ([6], -1.0))
    search = search_of(3)
    assert ids(search.advance(live, [tokens(t7=-1.0, t4=-1.0), tokens(t3=-1.0)])) == [(0, 4), (0, 7), (1, 3)]


def test_only_the_best_width_candidates_may_finish() -> None:
    live = live_beams(([5], -1.0), ([6], -1.0))
    search = search_of(2)
    survivors = search.advance(live, [tokens(t4=-0.1, t5=-0.2, t9=-0.3), tokens(t4=-0.4)])
    assert ids(survivors) == [(0, 4), (0, 5)]
    assert search.finished == []


def test_a_finished_score_is_divided_by_the_length_to_the_penalty() -> None:
    for penalty, score in ((0.0, -3.0), (1.0, -1.0), (2.0, -1.0 / 3), (-1.0, -9.0)):
        search = search_of(1, length_penalty=penalty)
        search.advance(live_beams(([5, 6], -2.5)), [tokens(t9=-0.5, t4=-0.6)])
        (finished,) = search.finished
        assert finished.score == pytest.approx(score)
        assert finished.token_ids == [5, 6, EOS]
        assert finished.cumulative_logprob == -2.75


def test_the_last_token_that_is_allowed_finishes_a_beam() -> None:
    search = search_of(2, max_tokens=2)
    live = live_beams(([5], -1.0), ([6], -1.1), max_tokens=2)
    assert search.advance(live, [tokens(t4=-1.0), tokens(t4=-1.0)]) == []
    assert search.is_done
    assert [beam.token_ids for beam in search.finished] == [[5, 4], [6, 4]]
    assert {beam.ending.finish_reason for beam in search.finished} == {"length"}


def test_a_stop_id_is_the_reason_and_eos_is_none() -> None:
    search = search_of(2, num_stop_ids=2)
    search.advance(live_beams(([5], -1.0)), [tokens(t9=-0.1, t8=-0.2, t4=-0.3)])
    assert [beam.ending.stop_reason for beam in search.finished] == [None, STOP]


def test_finished_beams_are_kept_best_first_and_at_most_width() -> None:
    search = search_of(2, length_penalty=0.0, early_stopping="never")
    search.advance(live_beams(([5], -1.0)), [tokens(t9=-3.0, t4=-0.5)])
    search.advance(live_beams(([5, 4], -1.5)), [tokens(t9=-1.0, t4=-0.5)])
    search.advance(live_beams(([5, 4, 4], -2.0)), [tokens(t9=-1.5, t4=-0.5)])
    assert [beam.score for beam in search.finished] == [-2.5, -3.5]


def finished_after_two(early_stopping: Literal[True, False, "never"], penalty: float, best_live: float) -> bool:
    """Whether a search of width 1 is done when one beam of 3 tokens finished with -1 in all and one lives on."""
    search = search_of(1, length_penalty=penalty, early_stopping=early_stopping, max_tokens=12)
    live = live_beams(([5, 6], -0.5), max_tokens=12)
    search.advance(live, [tokens(t9=-0.5, t4=best_live + 0.5)])
    return search.is_done


def test_early_stopping_ends_as_soon_as_width_beams_are_finished() -> None:
    assert finished_after_two(True, 1.0, -1.01)


def test_without_early_stopping_the_live_beams_must_beat_the_worst_at_their_present_length() -> None:
    assert finished_after_two(False, 1.0, -1.01)
    assert finished_after_two(False, 0.0, -1.01)


def test_never_gives_up_only_when_not_even_the_longest_beam_could_win() -> None:
    # -1 over 3 tokens against -3.9 or -4.1 over the 12 that may be generated.
    assert not finished_after_two("never", 1.0, -3.9)
    assert finished_after_two("never", 1.0, -4.1)
    assert finished_after_two("never", 0.0, -1.01)
    assert finished_after_two("never", -1.0, -1.01)


def test_a_search_with_fewer_finished_beams_than_width_goes_on() -> None:
    search = search_of(2, early_stopping=True)
    search.advance(live_beams(([5], -0.1)), [tokens(t9=-0.1, t4=-90.0)])
    assert not search.is_done


def test_a_search_without_survivors_is_done() -> None:
    search = search_of(2)
    assert search.advance(live_beams(([5], -0.1)), [tokens(t9=-0.1)]) == []
    assert search.is_done
    assert len(search.finished) == 1


def test_a_restarted_search_has_forgotten_everything_but_its_settings() -> None:
    search = search_of(2, num_stop_ids=3)
    search.advance(live_beams(([5], -1.0)), [tokens(t9=-0.1, t4=-0.5)])
    again = search.restarted()
    assert (again.finished, again.is_done) == ([], False)
    assert (again.params, again.max_tokens, again.num_candidates) == (search.params, 10, 8)


def test_a_penalty_that_overflows_is_refused() -> None:
    with pytest.raises(ValueError, match="length_penalty"):
        BeamParams(width=2, length_penalty=1e6)
    with pytest.raises(ValueError, match="length_penalty"):
        BeamParams(width=2, length_penalty=float("nan"))
    search = search_of(1, length_penalty=-50.0)
    search.advance(live_beams(([5] * 9, -1.0)), [tokens(t9=-0.1)])
    assert search.finished[0].score == pytest.approx(-1.1e50)


def test_the_search_is_decided_without_torch() -> None:
    code = "import sys, batchgen.engine.beam, batchgen.engine.sequence; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
