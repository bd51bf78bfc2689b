"""sample: controls, draws, log-probabilities."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from batchgen_kernels.philox import GROUP_DRAWS, gumbel, random_bits
from batchgen_kernels.sample import (
    GROUP_TOKENS,
    SampleBuffers,
    SampleParams,
    SampleResult,
    TokenBias,
    TokenCounts,
    sample_launches,
    sample_reference,
    sample_triton,
)
from batchgen_kernels.sample_reference import edit_logits
from batchgen_kernels.top_filters import Filters, kept_tokens
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

from tests.kernels.sample_cases import keys, mixed_params, rows_of


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    logits_RV = torch.zeros(3, 1000)
    logits_RV[1, [17, 400, 999]] = 2.0
    logits_RV[2, 999] = 1.0
    for params in (
        SampleParams(all_greedy=True),
        SampleParams(temperature_R=torch.zeros(3)),
        SampleParams(top_k_R=torch.ones(3, dtype=torch.long)),
    ):
        assert sample_reference(logits_RV, params, keys(3)).token_ids_R.tolist() == [0, 17, 999]


def test_a_tiny_temperature_draws_among_the_best_only() -> None:
    logits_RV = torch.randn(64, 300, generator=torch.Generator().manual_seed(0)) * 20
    params = SampleParams(temperature_R=torch.full((64,), 1e-38))
    result = sample_reference(logits_RV, params, keys(64))
    assert torch.equal(result.token_ids_R, logits_RV.argmax(1))
    assert result.ok_R.all()


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits_RV = torch.randn(40, 1003, generator=torch.Generator().manual_seed(1)) * 4
    result = sample_reference(logits_RV, mixed_params(40), keys(40))
    expected = logits_RV.double().log_softmax(1).gather(1, result.token_ids_R[:, None]).squeeze(1)
    torch.testing.assert_close(result.logprobs_R.double(), expected, rtol=1e-6, atol=2e-6)


def test_rows_without_a_finite_best_logit_are_reported() -> None:
    logits_RV = torch.randn(5, 600)
    logits_RV[1] = -torch.inf
    logits_RV[2, 599] = torch.nan
    logits_RV[3, 5] = torch.inf
    for params in (SampleParams(), SampleParams(all_greedy=True), SampleParams(top_p_R=torch.full((5,), 0.5))):
        result = sample_reference(logits_RV, params, keys(5))
        assert result.ok_R.tolist() == [True, False, False, False, True]
        assert result.logprobs_R.isfinite().all()
        assert result.token_ids_R[1:4].tolist() == [0, 0, 0]


def test_a_row_whose_every_token_is_banned_is_reported() -> None:
    bans = TokenBias(torch.zeros(4, dtype=torch.long), torch.arange(4), torch.full((4,), -torch.inf))
    result = sample_reference(torch.zeros(2, 4), SampleParams(bias=bans), keys(2))
    assert result.ok_R.tolist() == [False, True]


def test_banned_tokens_are_never_drawn() -> None:
    num_rows = 400
    row_N = torch.arange(num_rows).repeat_interleave(3)
    bans = TokenBias(row_N, torch.tensor([0, 2, 3]).repeat(num_rows), torch.full((3 * num_rows,), -torch.inf))
    result = sample_reference(torch.zeros(num_rows, 5), SampleParams(bias=bans), keys(num_rows))
    assert set(result.token_ids_R.tolist()) == {1, 4}


def test_repetition_penalty_and_temperature_equal_transformers() -> None:
    logits_RV = torch.randn(1, 50, generator=torch.Generator().manual_seed(2))
    seen = torch.tensor([3, 9, 9, 31])
    counts = TokenCounts(torch.zeros(3, dtype=torch.long), seen.unique(), torch.zeros(3, dtype=torch.int32))
    params = SampleParams(repetition_penalty_R=torch.tensor([1.3]), counts=counts)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(seen[None], logits_RV.clone())
    assert torch.equal(edit_logits(logits_RV, params), expected)
    scaled = TemperatureLogitsWarper(0.7)(seen[None], expected)
    drawn = sample_reference(logits_RV, replace(params, temperature_R=torch.tensor([0.7])), keys(1))
    assert torch.equal(drawn.token_ids_R, sample_reference(scaled, SampleParams(), keys(1)).token_ids_R)


def test_presence_and_frequency_penalties_follow_openai() -> None:
    logits_RV = torch.randn(2, 10, generator=torch.Generator().manual_seed(3))
    counts = TokenCounts(torch.tensor([0, 0, -1]), torch.tensor([4, 6, 7]), torch.tensor([3, 0, 9], dtype=torch.int32))
    params = SampleParams(
        presence_penalty_R=torch.tensor([0.5, 0.5]), frequency_penalty_R=torch.tensor([0.25, 0.25]), counts=counts
    )
    expected = logits_RV.clone()
    expected[0, 4] -= 3 * 0.25 + 0.5
    torch.testing.assert_close(edit_logits(logits_RV, params), expected)


def test_controls_act_in_their_order() -> None:
    logits_RV = torch.tensor([[1.0, 2.0, -1.0]])
    params = SampleParams(
        bias=TokenBias(torch.tensor([0]), torch.tensor([2]), torch.tensor([3.0])),
        counts=TokenCounts(torch.tensor([0]), torch.tensor([2]), torch.tensor([1], dtype=torch.int32)),
        repetition_penalty_R=torch.tensor([2.0]),
        presence_penalty_R=torch.tensor([0.25]),
    )
    torch.testing.assert_close(edit_logits(logits_RV, params), torch.tensor([[1.0, 2.0, (-1.0 + 3.0) / 2.0 - 0.25]]))


def test_logits_are_left_as_they_were() -> None:
    logits_RV = torch.randn(12, 700)
    before = logits_RV.clone()
    sample_reference(logits_RV, mixed_params(12), keys(12))
    assert torch.equal(logits_RV, before)


def test_a_row_does_not_depend_on_its_neighbours_or_on_threads() -> None:
    logits_RV = torch.randn(60, 2111, generator=torch.Generator().manual_seed(4)) * 3
    whole = sample_reference(logits_RV, mixed_params(60), keys(60))
    for count, rows in ((1, torch.tensor([7])), (2, torch.arange(59, 30, -1)), (3, torch.randperm(60)[:33])):
        torch.set_num_threads(count)
        alone = sample_reference(logits_RV[rows], rows_of(mixed_params(60), rows), keys(60)[rows])
        for part, of_whole in zip(alone, whole, strict=True):
            assert torch.equal(part, of_whole[rows])


@pytest.mark.parametrize("vocabulary", [1, 5, GROUP_TOKENS, GROUP_TOKENS + 1, 3 * GROUP_TOKENS + 100])
def test_the_draw_is_gumbel_max_over_groups_then_over_the_group(vocabulary: int) -> None:
    logits_RV = torch.randn(20, vocabulary, generator=torch.Generator().manual_seed(5)) * 2
    result = sample_reference(logits_RV, SampleParams(), keys(20))
    for row in range(20):
        key = keys(20)[row : row + 1]
        groups = torch.stack([part.double().logsumexp(0) for part in logits_RV[row].split(GROUP_TOKENS)])
        noise = gumbel(random_bits(key, torch.tensor([GROUP_DRAWS]), len(groups))).squeeze(0)
        first = int((groups + noise).argmax()) * GROUP_TOKENS
        ids = torch.arange(first, min(first + GROUP_TOKENS, vocabulary))
        best = (logits_RV[row, ids] + gumbel(random_bits(key, torch.tensor([first]), len(ids))).squeeze(0)).argmax()
        assert int(result.token_ids_R[row]) == int(ids[best])


def chi_square(counts_V: torch.Tensor, probs_V: torch.Tensor) -> float:
    expected = probs_V.double() * counts_V.sum()
    return float(((counts_V - expected) ** 2 / expected).sum())


def test_draws_follow_the_distribution_over_several_groups() -> None:
    vocabulary, draws = 2 * GROUP_TOKENS + 30, 12_000
    logits_V = torch.randn(vocabulary, generator=torch.Generator().manual_seed(6))
    ids = sample_reference(logits_V.expand(draws, -1), SampleParams(), keys(draws)).token_ids_R
    statistic = chi_square(torch.bincount(ids, minlength=vocabulary), logits_V.softmax(0))
    degrees = vocabulary - 1
    assert abs(statistic - degrees) < 6 * (2 * degrees) ** 0.5  # six standard deviations: probability below 1e-6


def test_filtered_draws_follow_the_renormalised_distribution() -> None:
    draws = 5_000
    logits_V = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
    params = SampleParams(top_k_R=torch.full((draws,), 4), temperature_R=torch.full((draws,), 0.5))
    ids = sample_reference(logits_V.expand(draws, -1), params, keys(draws)).token_ids_R
    assert int(ids.max()) == 3
    assert chi_square(torch.bincount(ids, minlength=4), (logits_V[:4] / 0.5).softmax(0)) < 31  # 3 degrees: 1e-6


def test_results_have_their_types() -> None:
    result = sample_reference(torch.randn(3, 20).bfloat16(), SampleParams(), keys(3))
    assert isinstance(result, SampleResult)
    assert [part.dtype for part in result] == [torch.int64, torch.float32, torch.bool]


NO_CONTROLS = SampleParams()
TRITON_PARAMS = {
    "plain": NO_CONTROLS,
    "greedy": SampleParams(all_greedy=True),
    "temperature": SampleParams(temperature_R=torch.tensor([0.0, 0.5, 1.0, 2.0, 1e-38])),
    "top-k": SampleParams(top_k_R=torch.tensor([0, 1, 2, 50, 1100])),
    "top-p": SampleParams(top_p_R=torch.tensor([1.0, 0.01, 0.5, 0.9, 0.999])),
    "min-p": SampleParams(min_p_R=torch.tensor([0.0, 0.01, 0.3, 1.0, 1e-9])),
    "mixed": rows_of(mixed_params(30), torch.tensor([1, 4, 5, 11, 17])),
}


def assert_same_draws(actual: SampleResult, expected: SampleResult) -> None:
    assert torch.equal(actual.token_ids_R, expected.token_ids_R)
    assert torch.equal(actual.ok_R, expected.ok_R)
    torch.testing.assert_close(actual.logprobs_R, expected.logprobs_R, rtol=1e-6, atol=2e-6)


def scores(logits_RV: torch.Tensor, params: SampleParams) -> torch.Tensor:
    """Edited logits over temperature."""
    temperature_R = torch.ones(len(logits_RV)) if params.temperature_R is None else params.temperature_R
    return edit_logits(logits_RV.float(), params) / temperature_R.clamp(min=1e-30)[:, None]


def kept_by_reference(logits_RV: torch.Tensor, params: SampleParams) -> torch.Tensor:
    """Which tokens the reference's filters leave."""
    y_RV = scores(logits_RV, params)
    filters = Filters.of_rows(
        params.top_k_R, params.top_p_R, params.min_p_R, torch.arange(len(y_RV)), logits_RV.shape[1]
    )
    return kept_tokens(y_RV, y_RV.logsumexp(1), filters)


def run_triton(logits_RV: torch.Tensor, params: SampleParams) -> SampleBuffers:
    """Run the kernels and return all that they wrote."""
    buffers = SampleBuffers.allocate(logits_RV, params)
    for launch in sample_launches(logits_RV, params, keys(len(logits_RV)), buffers):
        launch.run()
    return buffers


def kept_by_triton(logits_RV: torch.Tensor, params: SampleParams, buffers: SampleBuffers) -> torch.Tensor:
    """Which tokens lie within the limits that the kernels found; a limit of top-k 1 is not looked for."""
    bits = (scores(logits_RV, params) + 0.0).view(torch.int32)
    key_RV = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    low_R1, tie_R1, last_R1 = buffers.limits_R3.split(1, dim=1)
    kept = (key_RV >= low_R1) & ((key_RV != tie_R1) | (torch.arange(key_RV.shape[1]) <= last_R1))
    if params.top_k_R is not None:
        kept &= (params.top_k_R != 1)[:, None] | (key_RV == key_RV.amax(1, keepdim=True))
    return kept


@pytest.mark.parametrize("vocabulary", [1, 7, 2 * GROUP_TOKENS + 50])
@pytest.mark.parametrize("params", TRITON_PARAMS.values(), ids=list(TRITON_PARAMS))
def test_triton_draws_what_the_reference_draws(params: SampleParams, vocabulary: int) -> None:
    logits_RV = torch.randn(5, vocabulary + 5, generator=torch.Generator().manual_seed(8))[:, :vocabulary] * 3
    if vocabulary < 20:
        params = replace(params, bias=None, counts=None)
    assert_same_draws(sample_triton(logits_RV, params, keys(5)), sample_reference(logits_RV, params, keys(5)))


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float16, "greedy"), (torch.bfloat16, "top-k"), (torch.float16, "top-p"), (torch.bfloat16, "mixed")],
)
def test_triton_takes_narrow_logits_and_keeps_ties_as_the_reference(dtype: torch.dtype, name: str) -> None:
    # Steps of 1/4: most filters cut through equal logits; the vocabulary takes two tiles.
    logits_RV = (
        (torch.randn(5, 9 * GROUP_TOKENS + 50, generator=torch.Generator().manual_seed(9)) * 4).round().div(4).to(dtype)
    )
    params = TRITON_PARAMS[name]
    buffers = run_triton(logits_RV, params)
    assert_same_draws(buffers.result, sample_reference(logits_RV, params, keys(5)))
    if name != "greedy":
        assert torch.equal(kept_by_triton(logits_RV, params, buffers), kept_by_reference(logits_RV, params))


def test_triton_reports_rows_without_a_finite_best_logit() -> None:
    logits_RV = torch.randn(5, 600, generator=torch.Generator().manual_seed(10))
    logits_RV[1] = -torch.inf
    logits_RV[2, 599] = torch.nan
    logits_RV[3, 5] = torch.inf
    for params in (NO_CONTROLS, SampleParams(all_greedy=True), SampleParams(top_p_R=torch.full((5,), 0.5))):
        assert_same_draws(sample_triton(logits_RV, params, keys(5)), sample_reference(logits_RV, params, keys(5)))


def test_triton_draws_with_the_bits_of_every_part_of_the_key() -> None:
    table = torch.tensor([[2**62 + 3, 2**31, 2**41 + 9, 2**30, 2**29], [5, 1, 2, 3, 4], [2**63 - 1, 0, 2**33, 7, 9]])
    logits_RV = torch.zeros(3, 3 * GROUP_TOKENS)
    assert_same_draws(sample_triton(logits_RV, NO_CONTROLS, table), sample_reference(logits_RV, NO_CONTROLS, table))
