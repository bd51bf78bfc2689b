"""The C++ twin of sample draws what the reference draws, at every instruction-set level."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from batchgen_kernels import cpu
from batchgen_kernels.philox import POSITION
from batchgen_kernels.sample import (
    GROUP_TOKENS,
    SampleParams,
    SampleResult,
    SampleSteps,
    TokenBias,
    TokenCounts,
    sample_reference,
)

from tests.kernels.cpu_cases import needs_kernels
from tests.kernels.sample_cases import keys, mixed_params, rows_of

pytestmark = needs_kernels

LEVELS = cpu.levels() if cpu.is_available() else []
DISTINCT = [level for level in LEVELS if level in ("portable", "avx2")] + LEVELS[2:][-1:]
"""Above AVX2 all levels run the same code here."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=DISTINCT)
def level(request: pytest.FixtureRequest) -> str:
    """Each instruction-set level that this processor runs, with code of its own."""
    cpu.set_level(request.param)
    return str(request.param)


def random_logits(rows: int, vocabulary: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def assert_same_draws(actual: SampleResult, expected: SampleResult) -> None:
    assert torch.equal(actual.token_ids_R, expected.token_ids_R)
    assert torch.equal(actual.ok_R, expected.ok_R)
    torch.testing.assert_close(actual.logprobs_R, expected.logprobs_R, rtol=1e-6, atol=3e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [9, GROUP_TOKENS, 5 * GROUP_TOKENS + 37])
@pytest.mark.usefixtures("level")
def test_it_draws_what_the_reference_draws_under_every_mix_of_controls(vocabulary: int, dtype: torch.dtype) -> None:
    logits_RV = random_logits(60, vocabulary).to(dtype)
    assert_same_draws(
        cpu.sample(logits_RV, mixed_params(60), keys(60)), sample_reference(logits_RV, mixed_params(60), keys(60))
    )


@pytest.mark.parametrize("steps", [SampleSteps, cpu.SampleSteps])
def test_each_call_draws_the_next_token_of_every_row(steps: Any) -> None:
    draw = steps(mixed_params(30), keys(30))
    for later in range(3):
        logits_RV, moved = random_logits(30, 700, later), keys(30)
        moved[:, POSITION] += later
        assert_same_draws(draw(logits_RV), sample_reference(logits_RV, mixed_params(30), moved))


def test_logits_for_other_rows_or_a_smaller_vocabulary_are_refused() -> None:
    bias = TokenBias(torch.tensor([0]), torch.tensor([8]), torch.tensor([1.0]))
    draw = cpu.SampleSteps(SampleParams(bias=bias), keys(2))
    assert len(draw(torch.zeros(2, 9)).token_ids_R) == 2
    with pytest.raises(ValueError, match=r"logits_RV must be \[2, V\], got \[3, 9\]"):
        draw(torch.zeros(3, 9))
    with pytest.raises(ValueError, match="bias_tokens must be below the vocabulary of 8"):
        draw(torch.zeros(2, 8))
    with pytest.raises(ValueError, match=r"keys_R5 must be int64 \[R, 5\]"):
        cpu.SampleSteps(SampleParams(), keys(2).int())


@pytest.mark.parametrize("vocabulary", [1, 2, 15, 16, 17, GROUP_TOKENS + 1])
@pytest.mark.usefixtures("level")
def test_odd_vocabularies(vocabulary: int) -> None:
    logits_RV = random_logits(20, vocabulary)
    for params in (
        SampleParams(),
        SampleParams(all_greedy=True),
        SampleParams(top_p_R=torch.full((20,), 0.6), top_k_R=torch.full((20,), 3)),
    ):
        assert_same_draws(cpu.sample(logits_RV, params, keys(20)), sample_reference(logits_RV, params, keys(20)))


FILTERS = {
    "top-k": SampleParams(top_k_R=torch.tensor([2, 3, 5, 8, 13, 21, 34, 39, 40, 41])),
    "top-p": SampleParams(top_p_R=torch.tensor([1e-6, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 0.99, 1.0])),
    "min-p": SampleParams(min_p_R=torch.tensor([0.0, 1e-4, 0.01, 0.05, 0.1, 0.2, 0.4, 0.7, 0.9, 1.0])),
    "top-k and top-p": SampleParams(
        top_k_R=torch.tensor([2, 3, 5, 8, 13, 21, 34, 39, 0, 1]),
        top_p_R=torch.tensor([0.5, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 0.99, 0.3]),
    ),
}


@pytest.mark.parametrize("step", [None, 0.5], ids=["all different", "ties"])
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.usefixtures("level")
def test_the_filters_keep_what_the_reference_keeps(name: str, step: float | None) -> None:
    """300 draws of each of ten rows: a token that one of both keeps alone would be drawn."""
    logits_RV = random_logits(10, 40, seed=3, spread=1.0)
    if step is not None:
        logits_RV = (logits_RV / step).round() * step
    rows = torch.arange(10).repeat(300)
    vectors = {key: value[rows] for key, value in vars(FILTERS[name]).items() if isinstance(value, torch.Tensor)}
    params = SampleParams(**vectors)
    assert_same_draws(
        cpu.sample(logits_RV[rows], params, keys(3000)), sample_reference(logits_RV[rows], params, keys(3000))
    )


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 30.0])
def test_the_filters_hold_over_large_vocabularies_flat_and_steep(spread: float) -> None:
    logits_RV = random_logits(12, 50_257, seed=4, spread=spread).bfloat16()
    params = SampleParams(
        top_k_R=torch.tensor([0, 50, 300, 5000, 50_256, 0, 0, 0, 2, 200, 0, 0]),
        top_p_R=torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.1, 0.9, 0.999, 0.9, 0.5, 1.0, 0.9999]),
        min_p_R=torch.tensor([0.0] * 10 + [0.05, 0.0]),
    )
    for seed in range(4):
        assert_same_draws(
            cpu.sample(logits_RV, params, keys(12, seed)), sample_reference(logits_RV, params, keys(12, seed))
        )


@pytest.mark.usefixtures("level")
def test_rows_without_a_finite_best_logit_are_reported() -> None:
    logits_RV = random_logits(5, 600)
    logits_RV[1] = -torch.inf
    logits_RV[2, 599] = torch.nan
    logits_RV[3, 5] = torch.inf
    for params in (
        SampleParams(),
        SampleParams(all_greedy=True),
        SampleParams(top_p_R=torch.full((5,), 0.5), temperature_R=torch.full((5,), 0.5)),
        SampleParams(top_k_R=torch.full((5,), 7)),
    ):
        result = cpu.sample(logits_RV, params, keys(5))
        assert_same_draws(result, sample_reference(logits_RV, params, keys(5)))
        assert result.ok_R.tolist() == [True, False, False, False, True]
        assert result.logprobs_R.isfinite().all()


@pytest.mark.usefixtures("level")
def test_a_group_whose_every_token_is_banned_is_never_drawn() -> None:
    banned = torch.arange(GROUP_TOKENS, 2 * GROUP_TOKENS)
    row_N = torch.arange(200).repeat_interleave(GROUP_TOKENS)
    bans = TokenBias(row_N, banned.repeat(200), torch.full((len(row_N),), -torch.inf))
    for params in (SampleParams(bias=bans), SampleParams(bias=bans, top_p_R=torch.full((200,), 0.9999))):
        result = cpu.sample(torch.zeros(200, 3 * GROUP_TOKENS), params, keys(200))
        assert set((result.token_ids_R // GROUP_TOKENS).tolist()) == {0, 2}
    whole = TokenBias(torch.zeros(9).long(), torch.arange(9), torch.full((9,), -torch.inf))
    assert cpu.sample(torch.zeros(2, 9), SampleParams(bias=whole), keys(2)).ok_R.tolist() == [False, True]


@pytest.mark.usefixtures("level")
def test_edits_may_come_in_any_order_of_rows_and_be_skipped() -> None:
    logits_RV = random_logits(4, 300)
    bias = TokenBias(torch.tensor([3, -1, 0, 2]), torch.tensor([7, 1, 250, 9]), torch.tensor([5.0, 99.0, 40.0, -2.0]))
    counts = TokenCounts(
        torch.tensor([2, 0, -1, 0]), torch.tensor([9, 3, 4, 299]), torch.tensor([2, 0, 7, 1], dtype=torch.int32)
    )
    params = SampleParams(
        bias=bias,
        counts=counts,
        repetition_penalty_R=torch.full((4,), 1.7),
        presence_penalty_R=torch.full((4,), -1.0),
        frequency_penalty_R=torch.full((4,), 0.5),
    )
    for seed in range(20):
        assert_same_draws(
            cpu.sample(logits_RV, params, keys(4, seed)), sample_reference(logits_RV, params, keys(4, seed))
        )


def test_a_row_does_not_depend_on_its_neighbours_or_on_threads() -> None:
    logits_RV = random_logits(60, 2111, seed=5)
    whole = cpu.sample(logits_RV, mixed_params(60), keys(60))
    for threads, rows in ((1, torch.tensor([7])), (2, torch.arange(59, 30, -1)), (3, torch.randperm(60)[:33])):
        torch.set_num_threads(threads)
        alone = cpu.sample(logits_RV[rows], rows_of(mixed_params(60), rows), keys(60)[rows])
        for part, of_whole in zip(alone, whole, strict=True):
            assert torch.equal(part, of_whole[rows])


@pytest.mark.usefixtures("level")
def test_every_part_of_the_key_counts() -> None:
    table = torch.tensor([[2**62 + 3, 2**31, 2**41 + 9, 2**30, 2**29], [5, 1, 2, 3, 4], [2**63 - 1, 0, 2**33, 7, 9]])
    logits_RV = torch.zeros(3, 3 * GROUP_TOKENS)
    assert_same_draws(cpu.sample(logits_RV, SampleParams(), table), sample_reference(logits_RV, SampleParams(), table))
    for column in range(5):
        other = table.clone()
        other[:, column] += 1 if column else -1
        assert (cpu.sample(logits_RV, SampleParams(), other).token_ids_R != 0).any()
        changed = cpu.sample(logits_RV, SampleParams(), other).token_ids_R
        assert (changed != cpu.sample(logits_RV, SampleParams(), table).token_ids_R).any()


def test_draws_follow_the_distribution() -> None:
    draws = 20_000
    logits_V = random_logits(1, GROUP_TOKENS + 60, seed=6, spread=1.0)[0]
    params = SampleParams(temperature_R=torch.full((draws,), 0.8), top_p_R=torch.full((draws,), 0.95))
    ids = cpu.sample(logits_V.expand(draws, -1), params, keys(draws)).token_ids_R
    probs_V = (logits_V / 0.8).softmax(0)
    order = probs_V.argsort(descending=True)
    kept = order[: int((probs_V[order].cumsum(0) < 0.95).sum()) + 1]
    expected = probs_V[kept].double() / probs_V[kept].sum() * draws
    observed = torch.bincount(ids, minlength=len(logits_V))
    assert int(observed[kept].sum()) == draws
    statistic, degrees = float(((observed[kept] - expected) ** 2 / expected).sum()), len(kept) - 1
    # Six standard deviations of chi-squared: a false alarm has a probability below 1e-6, and the seed is fixed.
    assert abs(statistic - degrees) < 6 * (2 * degrees) ** 0.5


def test_logits_are_left_as_they_were_and_may_be_strided() -> None:
    wide = random_logits(12, 1400)
    logits_RV, before = wide[:, :700], wide.clone()
    strided = cpu.sample(logits_RV, mixed_params(12), keys(12))
    assert torch.equal(wide, before)
    assert_same_draws(strided, cpu.sample(logits_RV.contiguous(), mixed_params(12), keys(12)))
    assert_same_draws(cpu.sample(logits_RV.T.contiguous().T, mixed_params(12), keys(12)), strided)
    assert cpu.sample(logits_RV[:0], SampleParams(), keys(0)).token_ids_R.shape == (0,)


def test_what_does_not_fit_is_refused_by_name() -> None:
    logits_RV = torch.zeros(2, 10)
    with pytest.raises(ValueError, match=r"top_p_R must be \[2\], got \[3\]"):
        cpu.sample(logits_RV, SampleParams(top_p_R=torch.ones(3)), keys(2))
    with pytest.raises(ValueError, match=r"logits_RV must be \[3, V\], got \[2, 10\]"):
        cpu.sample(logits_RV, SampleParams(), keys(3))
    for token in (10, -1):
        bias = TokenBias(torch.zeros(1).long(), torch.tensor([token]), torch.ones(1))
        with pytest.raises(ValueError, match="bias_tokens must be below the vocabulary of 10"):
            cpu.sample(logits_RV, replace(SampleParams(), bias=bias), keys(2))
    with pytest.raises(TypeError, match="logits must be"):
        cpu.sample(logits_RV.double(), SampleParams(), keys(2))
