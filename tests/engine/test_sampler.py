"""The sampler alone: which logits row and which parameters a draw goes by, and what is told about it."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch

from batchgen.engine.batch import Draw
from batchgen.engine.beam import BeamSearch
from batchgen.engine.ops import REFERENCE, select_ops
from batchgen.engine.sampler import Sampler
from batchgen.engine.sequence import Sequence, SequenceGroup
from batchgen.engine.token_bias import TokenEdits
from batchgen.records import TokenLogprob
from batchgen.sampling_params import BeamParams, SamplingParams

VOCAB_SIZE = 50
BANNED = float("-inf")


@pytest.fixture(params=["reference", "kernels"])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return Sampler(REFERENCE if request.param == "reference" else select_ops(torch.device("cpu")))


def sequence_of(row: int = 0, num_stop_ids: int = 1, **settings: Any) -> Sequence:
    params = SamplingParams(**settings)
    edits = TokenEdits(params.logit_bias)
    group = SequenceGroup(row, array("i", [1, 2]), params, 0, row, 1, 8, edits=edits)
    if params.beam is not None:
        group.search = BeamSearch(params.beam, num_stop_ids, 8)
    group.sequences.append(group.new_sequence(0))
    return group.sequences[0]


def logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def draw(sampler: Sampler, logits_LV: torch.Tensor, rows: list[int], sequences: list[Sequence]) -> list[Draw]:
    return sampler.sample(logits_LV, rows, sequences).read()


def test_nothing_asked_is_nothing_drawn(sampler: Sampler) -> None:
    assert draw(sampler, logits(0), [], []) == []
    assert sampler.continuations(logits(0), [], []) == []


def test_each_draw_goes_by_the_row_beside_it(sampler: Sampler) -> None:
    logits_LV = logits(4)
    rows = [2, 0, 2, 3]
    drawn = draw(sampler, logits_LV, rows, [sequence_of(row, temperature=0) for row in range(4)])
    assert [each.token_id for each in drawn] == logits_LV.argmax(-1)[torch.tensor(rows)].tolist()
    expected = logits_LV.log_softmax(-1).amax(-1)[torch.tensor(rows)].tolist()
    assert [each.logprob for each in drawn] == pytest.approx(expected, abs=1e-5)


def test_each_draw_goes_by_the_parameters_of_its_own_sequence(sampler: Sampler) -> None:
    # Greedy, biased and random rows side by side are what each is alone.
    logits_LV = logits(3)
    sequences = [
        sequence_of(0, temperature=0),
        sequence_of(1, temperature=0, logit_bias={7: 50.0}),
        sequence_of(2, temperature=1.3, top_k=9, min_p=0.01),
    ]
    together = draw(sampler, logits_LV, [0, 1, 2], sequences)
    assert together == [draw(sampler, logits_LV, [row], [sequences[row]])[0] for row in range(3)]
    assert together[1].token_id == 7


def test_a_row_without_a_token_to_draw_is_not_ok(sampler: Sampler) -> None:
    logits_LV = logits(3)
    logits_LV[1] = BANNED
    logits_LV[2, 5] = float("nan")
    assert [each.ok for each in draw(sampler, logits_LV, [0, 1, 2], [sequence_of(row) for row in range(3)])] == [
        True,
        False,
        False,
    ]


def test_only_who_asks_is_told_alternatives_and_as_many_as_asked(sampler: Sampler) -> None:
    logits_LV = logits(3)
    sequences = [sequence_of(0), sequence_of(1, logprobs=0), sequence_of(2, logprobs=4, logit_bias={3: 90.0})]
    first, second, third = draw(sampler, logits_LV, [0, 1, 2], sequences)
    assert first.alternatives is None
    assert [entry.token_id for entry in second.alternatives or ()] == [second.token_id]
    assert third.alternatives is not None
    # The bias decided the draw, but what is told are the logits as the model gave them.
    rank = 1 + int((logits_LV[2] > logits_LV[2, 3]).sum())
    assert (third.alternatives[0].token_id, third.alternatives[0].rank) == (3, rank)
    best = [token for token in logits_LV[2].topk(4).indices.tolist() if token != 3]
    assert [entry.token_id for entry in third.alternatives[1:]] == best


def test_continuations_are_the_best_tokens_as_many_as_each_search_wants(sampler: Sampler) -> None:
    logits_LV = logits(2)
    beams = [
        sequence_of(0, beam=BeamParams(width=2)),
        sequence_of(1, num_stop_ids=3, beam=BeamParams(width=3), logit_bias={9: 2.0}),
    ]
    small, large = sampler.continuations(logits_LV, [1, 0], beams)
    assert [each.token_id for each in small] == logits_LV[1].topk(4).indices.tolist()
    logprobs_V = logits_LV[0].log_softmax(-1)
    # As in transformers: edits act on log-probabilities, which are not normalised again.
    edited_V = logprobs_V.clone()
    edited_V[9] += 2.0
    expected = edited_V.topk(12)
    assert [each.token_id for each in large] == expected.indices.tolist()
    assert [each.logprob for each in large] == pytest.approx(expected.values.tolist(), abs=1e-5)
    assert [each.raw_logprob for each in large] == pytest.approx(logprobs_V[expected.indices].tolist(), abs=1e-5)


def test_banned_tokens_are_no_continuations(sampler: Sampler) -> None:
    logits_LV = torch.full((1, VOCAB_SIZE), BANNED)
    logits_LV[0, [4, 8]] = torch.tensor([0.0, 1.0])
    (found,) = sampler.continuations(logits_LV, [0], [sequence_of(beam=BeamParams(width=4))])
    assert [each.token_id for each in found] == [8, 4]


def test_scores_are_those_of_the_given_tokens_with_their_ranks(sampler: Sampler) -> None:
    logits_LV = logits(3)
    logits_LV[0, 10:20] = 7.0
    entries = sampler.score(logits_LV, [15, 0, 49], 2)
    logprobs_LV = logits_LV.log_softmax(-1)
    for row, token_id in enumerate((15, 0, 49)):
        assert isinstance(entries[row][0], TokenLogprob)
        assert entries[row][0].token_id == token_id
        assert entries[row][0].logprob == pytest.approx(float(logprobs_LV[row, token_id]), abs=1e-5)
    # Of equal tokens the lowest id has the lowest rank.
    assert entries[0][0].rank == 6
    assert [(entry.token_id, entry.rank) for entry in entries[0][1:]] == [(10, 1), (11, 2)]
