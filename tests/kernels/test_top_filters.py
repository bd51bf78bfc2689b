"""top-k, top-p and min-p keep what transformers' processors keep."""

from __future__ import annotations

import pytest
import torch
from batchgen_kernels import top_filters
from batchgen_kernels.top_filters import Filters, kept_tokens
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

SETTINGS = [
    (0, 1.0, 0.0),
    (2, 1.0, 0.0),
    (50, 1.0, 0.0),
    (3000, 1.0, 0.0),
    (0, 0.9, 0.0),
    (0, 0.05, 0.0),
    (0, 0.9999, 0.0),
    (0, 1.0, 0.05),
    (0, 1.0, 1.0),
    (50, 0.8, 0.0),
    (50, 0.8, 0.1),
    (1200, 0.99, 0.001),
]


def kept_by_transformers(scores_RV: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    ids = torch.zeros(len(scores_RV), 1, dtype=torch.long)
    if top_k > 0:
        scores_RV = TopKLogitsWarper(top_k)(ids, scores_RV)
    if top_p < 1:
        scores_RV = TopPLogitsWarper(top_p)(ids, scores_RV)
    if min_p > 0:
        scores_RV = MinPLogitsWarper(min_p)(ids, scores_RV)
    return scores_RV > -torch.inf


def kept(scores_RV: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    rows = torch.arange(len(scores_RV))
    filters = Filters.of_rows(
        torch.full(rows.shape, top_k),
        torch.full(rows.shape, top_p),
        torch.full(rows.shape, min_p),
        rows,
        scores_RV.shape[1],
    )
    return kept_tokens(scores_RV, scores_RV.logsumexp(1), filters) & (scores_RV > -torch.inf)


def near_the_border(scores_RV: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Tokens for which top-p is decided by less than the rounding of transformers' fp32 sums."""
    probs = torch.where(kept_by_transformers(scores_RV, top_k, 1, 0), scores_RV.double(), -torch.inf).softmax(1)
    falling = probs.sort(1, descending=True)
    before = (falling.values.cumsum(1) - falling.values).gather(1, falling.indices.argsort(1))
    return (before - top_p).abs() < 1e-6


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), SETTINGS)
@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
def test_kept_tokens_equal_those_of_transformers(spread: float, top_k: int, top_p: float, min_p: float) -> None:
    torch.manual_seed(1)
    scores_RV = torch.randn(4, 5003) * spread
    scores_RV[1, ::3] = -torch.inf
    ours, theirs = kept(scores_RV, top_k, top_p, min_p), kept_by_transformers(scores_RV, top_k, top_p, min_p)
    differ = ours != theirs
    assert not (differ & ~near_the_border(scores_RV, top_k, top_p)).any()
    assert differ.sum() <= 4


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), SETTINGS)
def test_of_equal_scores_as_many_are_kept_as_by_transformers(top_k: int, top_p: float, min_p: float) -> None:
    torch.manual_seed(2)
    scores_RV = torch.randint(-4, 5, (16, 3001)).float()
    ours, theirs = kept(scores_RV, top_k, top_p, min_p), kept_by_transformers(scores_RV, top_k, top_p, min_p)
    # Sums of equal terms in fp32 may be one term off where a border falls on one of them.
    assert ((ours.sum(1) - theirs.sum(1)).abs() <= (1 if top_p < 1 else 0)).all()
    for score in range(-4, 5):
        of_score = ours & (scores_RV == score)
        first_left_out = torch.where((scores_RV == score) & ~ours, torch.arange(3001), 3001).amin(1)
        last_kept = torch.where(of_score, torch.arange(3001), -1).amax(1)
        assert (last_kept < first_left_out).all()


def test_rows_with_filters_of_their_own_do_not_touch_each_other() -> None:
    torch.manual_seed(3)
    scores_RV = torch.randn(len(SETTINGS), 2000)
    k_R, p_R, m_R = (torch.tensor(column) for column in zip(*SETTINGS, strict=True))
    rows = torch.arange(len(SETTINGS))
    mixed = kept_tokens(scores_RV, scores_RV.logsumexp(1), Filters.of_rows(k_R, p_R, m_R, rows, 2000))
    for row, setting in enumerate(SETTINGS):
        assert torch.equal(mixed[row], kept(scores_RV[row : row + 1], *setting)[0])


def test_a_threshold_beyond_the_candidates_is_found_by_a_whole_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(4)
    scores_RV = torch.randn(3, 500)
    expected = [kept(scores_RV, *setting) for setting in SETTINGS]
    monkeypatch.setattr(top_filters, "MAX_CANDIDATES", 4)
    for setting, answer in zip(SETTINGS, expected, strict=True):
        assert torch.equal(kept(scores_RV, *setting), answer)


@pytest.mark.parametrize("vocabulary", [1, 2, 7])
def test_one_token_always_survives(vocabulary: int) -> None:
    scores_RV = torch.linspace(-1e30, 0.0, vocabulary).expand(2, -1).clone()
    for setting in SETTINGS:
        assert kept(scores_RV, *setting)[:, -1].all()
