"""top_tokens and token_ranks: the reference and its twins in Triton and C++."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from batchgen_kernels import cpu
from batchgen_kernels.sample import SampleParams, TokenBias, TokenCounts
from batchgen_kernels.top_tokens import (
    TokenRanks,
    TopTokens,
    token_ranks,
    token_ranks_triton,
    top_tokens,
    top_tokens_triton,
)

from tests.kernels.cpu_cases import needs_kernels
from tests.kernels.sample_cases import mixed_params


class Twin(NamedTuple):
    """One implementation of both ops."""

    top_tokens: Callable[..., TopTokens]
    token_ranks: Callable[..., TokenRanks]


LEVELS = cpu.levels() if cpu.is_available() else ["portable"]
DISTINCT = [level for level in LEVELS if level in ("portable", "avx2")] + LEVELS[2:][-1:]
"""Above AVX2 all levels run the same code here."""


@pytest.fixture(params=["reference", "triton", *(pytest.param(level, marks=needs_kernels) for level in DISTINCT)])
def twin(request: pytest.FixtureRequest) -> Twin:
    """The reference, the Triton kernels, and each instruction-set level that has code of its own here."""
    if request.param == "reference":
        return Twin(top_tokens, token_ranks)
    if request.param == "triton":
        return Twin(top_tokens_triton, token_ranks_triton)
    cpu.set_level(request.param)
    return Twin(cpu.top_tokens, cpu.token_ranks)


def random_logits(rows: int, vocabulary: int, step: float | None = None) -> torch.Tensor:
    logits_RV = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0)) * 3
    return logits_RV if step is None else (logits_RV / step).round() * step


def expected_order(scores_V: torch.Tensor) -> list[int]:
    return sorted(range(len(scores_V)), key=lambda token_id: (-float(scores_V[token_id]), token_id))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("step", [None, 2.0], ids=["all different", "ties"])
@pytest.mark.parametrize(("vocabulary", "count"), [(1, 1), (7, 3), (16, 16), (600, 1), (600, 40), (2000, 9)])
def test_the_best_tokens_come_best_first_and_equal_ones_by_id(
    twin: Twin, vocabulary: int, count: int, step: float | None, dtype: torch.dtype
) -> None:
    logits_RV = random_logits(3, vocabulary, step).to(dtype)
    found = twin.top_tokens(logits_RV, count)
    logprobs_RV = logits_RV.double().log_softmax(1)
    for row in range(3):
        ids = expected_order(logits_RV[row])[:count]
        assert found.token_ids_RK[row].tolist() == ids
        torch.testing.assert_close(found.logprobs_RK[row].double(), logprobs_RV[row, ids], rtol=1e-6, atol=3e-6)
    assert torch.equal(found.scores_RK, found.logprobs_RK)


def test_more_tokens_than_there_are_is_all_of_them(twin: Twin) -> None:
    assert twin.top_tokens(torch.zeros(2, 5), 9).token_ids_RK.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert twin.top_tokens(torch.zeros(2, 5), 0).token_ids_RK.shape == (2, 0)
    assert twin.top_tokens(torch.zeros(0, 5), 2).token_ids_RK.shape == (0, 2)


def test_edits_act_on_log_probabilities_which_are_not_normalised_again(twin: Twin) -> None:
    logits_RV = random_logits(12, 700)
    edits = mixed_params(12)
    found = twin.top_tokens(logits_RV, 30, edits)
    logprobs_RV = logits_RV.double().log_softmax(1)
    edited_RV = logprobs_RV.clone()
    for row in range(12):
        edited_RV[row, 5] = -torch.inf
        for token_id in (3, 8):
            value, times = float(edited_RV[row, token_id]), row % 4
            assert edits.repetition_penalty_R is not None
            value *= float(edits.repetition_penalty_R[row])
            value -= (0.0, 0.25)[row % 2] * times + ((0.0, 0.5, -0.5)[row % 3] if times else 0.0)
            edited_RV[row, token_id] = value
        ids = expected_order(edited_RV[row])[:30]
        assert found.token_ids_RK[row].tolist() == ids
        torch.testing.assert_close(found.scores_RK[row].double(), edited_RV[row, ids], rtol=1e-6, atol=5e-6)
        torch.testing.assert_close(found.logprobs_RK[row].double(), logprobs_RV[row, ids], rtol=1e-6, atol=5e-6)


def test_banned_tokens_come_last_with_minus_infinity(twin: Twin) -> None:
    bans = TokenBias(torch.zeros(4).long(), torch.tensor([0, 1, 2, 4]), torch.full((4,), -torch.inf))
    found = twin.top_tokens(torch.zeros(1, 6), 6, SampleParams(bias=bans))
    assert found.token_ids_RK.tolist() == [[3, 5, 0, 1, 2, 4]]
    assert found.scores_RK.isneginf().tolist() == [[False, False, True, True, True, True]]
    assert found.logprobs_RK.isfinite().all()


def test_a_row_without_a_finite_best_has_minus_infinities(twin: Twin) -> None:
    logits_RV = random_logits(4, 400)
    logits_RV[0] = -torch.inf
    logits_RV[1, 399] = torch.nan
    logits_RV[2, 3] = torch.inf
    found = twin.top_tokens(logits_RV, 5)
    assert found.scores_RK.isneginf().all(1).tolist() == [True, True, True, False]
    assert found.logprobs_RK.isneginf().all(1).tolist() == [True, True, True, False]
    assert found.token_ids_RK[:3].tolist() == [[0, 1, 2, 3, 4]] * 3
    counts = TokenCounts(torch.arange(4), torch.full((4,), 3), torch.ones(4, dtype=torch.int32))
    edits = SampleParams(counts=counts, presence_penalty_R=torch.ones(4))
    assert twin.top_tokens(logits_RV, 5, edits).scores_RK.isneginf().all(1).tolist() == [True, True, True, False]


@pytest.mark.parametrize("step", [None, 2.0], ids=["all different", "ties"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ranks_are_places_in_the_order_of_top_tokens(twin: Twin, step: float | None, dtype: torch.dtype) -> None:
    logits_RV = random_logits(4, 530, step).to(dtype)
    ids_RC = torch.tensor([[0, 529, 17, 300], [5, 5, 6, 7], [511, 512, 513, 527], [256, 255, 1, 2]])
    found = twin.token_ranks(logits_RV, ids_RC)
    logprobs_RV = logits_RV.double().log_softmax(1)
    torch.testing.assert_close(found.logprobs_RC.double(), logprobs_RV.gather(1, ids_RC), rtol=1e-6, atol=3e-6)
    for row in range(4):
        order = expected_order(logits_RV[row])
        assert found.ranks_RC[row].tolist() == [order.index(token_id) + 1 for token_id in ids_RC[row].tolist()]
    best = twin.top_tokens(logits_RV, 20)
    beside = twin.token_ranks(logits_RV, ids_RC, 20)
    assert torch.equal(beside.ranks_RC, found.ranks_RC)
    assert torch.equal(beside.best_ids_RK, best.token_ids_RK)
    torch.testing.assert_close(beside.best_logprobs_RK, best.logprobs_RK)
    of_best = twin.token_ranks(logits_RV, best.token_ids_RK)
    assert of_best.ranks_RC.tolist() == [list(range(1, 21))] * 4
    torch.testing.assert_close(of_best.logprobs_RC, best.logprobs_RK)


def test_no_tokens_have_no_ranks(twin: Twin) -> None:
    assert twin.token_ranks(torch.zeros(2, 5), torch.zeros(2, 0).long()).ranks_RC.shape == (2, 0)


@needs_kernels
def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="token_ids_RC must be below the vocabulary of 5"):
        cpu.token_ranks(torch.zeros(1, 5), torch.tensor([[5]]))
    with pytest.raises(ValueError, match=r"token_ids_RC must be \[1, C\]"):
        cpu.token_ranks(torch.zeros(1, 5), torch.tensor([[1], [2]]))


@needs_kernels
def test_a_row_does_not_depend_on_its_neighbours_or_on_threads() -> None:
    logits_RV = random_logits(40, 1500)
    whole = cpu.top_tokens(logits_RV, 8)
    for count, rows in ((1, torch.tensor([7])), (2, torch.arange(39, 10, -1))):
        torch.set_num_threads(count)
        for part, of_whole in zip(cpu.top_tokens(logits_RV[rows], 8), whole, strict=True):
            assert torch.equal(part, of_whole[rows])
