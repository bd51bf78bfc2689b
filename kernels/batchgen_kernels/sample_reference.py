"""The torch reference of sample. Legend: R rows, V vocabulary, G groups, N entries of a list of edits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from batchgen_kernels.philox import GROUP_DRAWS, gumbel, random_bits
from batchgen_kernels.reduction import tree_sum, tree_sum_
from batchgen_kernels.sample_types import GROUP_TOKENS, MIN_TEMPERATURE, SampleParams, SampleResult
from batchgen_kernels.top_filters import Filters, kept_tokens

ELEMENTS_IN_CACHE = 1 << 18
"""Elements per slice of a pass over the logits, so that its buffer stays in the processor's cache."""


def _entries(row_N: Tensor, token_N: Tensor, *values_N: Tensor) -> tuple[Tensor, ...]:
    held = row_N >= 0
    return tuple(x[held] for x in (row_N, token_N, *values_N))


def edit_logits(logits_RV: Tensor, params: SampleParams) -> Tensor:
    """Return fp32 logits after bias, repetition, frequency and presence penalties; the input where there are none."""
    if params.bias is None and params.counts is None:
        return logits_RV
    edited_RV = logits_RV.to(torch.float32, copy=True)
    if params.bias is not None:
        row, token, value = _entries(*params.bias)
        edited_RV[row, token] += value.float()
    if params.counts is not None:
        row, token, count = _entries(*params.counts)
        x = edited_RV[row, token]
        if params.repetition_penalty_R is not None:
            penalty = params.repetition_penalty_R.float()[row]
            x = torch.where(x > 0, x / penalty, x * penalty)
        if params.frequency_penalty_R is not None:
            x = x - params.frequency_penalty_R.float()[row] * count
        if params.presence_penalty_R is not None:
            x = x - torch.where(count > 0, params.presence_penalty_R.float()[row], 0.0)
        edited_RV[row, token] = x
    return edited_RV


class GroupStats(NamedTuple):
    """Of each group of GROUP_TOKENS neighbouring tokens, fp32 [R, G]; the last group may be shorter."""

    sums_RG: Tensor
    """Log-sum-exp; -inf where all tokens are masked."""
    tops_RG: Tensor
    """The largest score."""


def group_stats(x_RV: Tensor, divisor_R: Tensor | None = None) -> GroupStats:
    """Return the stats of fp32(x) / divisor, slice by slice of rows in one buffer that stays in the cache."""
    (num_rows, vocabulary), device = x_RV.shape, x_RV.device
    num_groups = -(-vocabulary // GROUP_TOKENS)
    step = max(1, ELEMENTS_IN_CACHE // (num_groups * GROUP_TOKENS))
    buffer = torch.empty(min(step, num_rows), num_groups * GROUP_TOKENS, device=device)
    sums, tops = (torch.empty(num_rows, num_groups, device=device) for _ in range(2))
    for begin in range(0, num_rows, step):
        rows = slice(begin, min(begin + step, num_rows))
        part = buffer[: rows.stop - begin]
        part[:, :vocabulary] = x_RV[rows]
        part[:, vocabulary:] = -torch.inf
        if divisor_R is not None:
            part /= divisor_R[rows, None]
        grouped = part.view(-1, num_groups, GROUP_TOKENS)
        torch.amax(grouped, -1, out=tops[rows])
        anchor = torch.where(tops[rows] == -torch.inf, 0.0, tops[rows])
        grouped.sub_(anchor.unsqueeze(-1)).exp_()
        torch.add(tree_sum_(grouped).log_(), anchor, out=sums[rows])
    return GroupStats(sums, tops)


def _logsumexp(sums_RG: Tensor) -> Tensor:
    """Log-sum-exp over the groups, in the order of `tree_sum`; not finite where no group is."""
    top_R1 = sums_RG.amax(1, keepdim=True)
    return tree_sum(torch.exp(sums_RG - top_R1)).log() + top_R1.squeeze(1)


def log_normalizer(logits_RV: Tensor) -> Tensor:
    """Return fp32 [R], the log-sum-exp of each row in the one order that log-probabilities are taken with."""
    return _logsumexp(group_stats(logits_RV).sums_RG)


def _tokens_of(x_RV: Tensor, group_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ids [R, GROUP_TOKENS] of one group per row, and their values in fp32, -inf past the vocabulary."""
    token_RL = group_R[:, None] * GROUP_TOKENS + torch.arange(GROUP_TOKENS, device=x_RV.device)
    values = x_RV.gather(1, token_RL.clamp(max=x_RV.shape[1] - 1)).float()
    return token_RL, values.masked_fill(token_RL >= x_RV.shape[1], -torch.inf)


def _best(x_RV: Tensor, tops_RG: Tensor) -> Tensor:
    """Return the id of each row's largest value, the lowest of equal ones."""
    token_RL, values_RL = _tokens_of(x_RV, tops_RG.argmax(1))
    return token_RL.gather(1, values_RL.argmax(1, keepdim=True)).squeeze(1)


def _draw(x_RV: Tensor, divisor_R: Tensor | None, sums_RG: Tensor, keys_R5: Tensor) -> Tensor:
    """Draw a token id per row from softmax(x / divisor) by Gumbel-max over groups, then over the chosen group."""
    first_R = torch.full((len(x_RV),), GROUP_DRAWS, device=x_RV.device)
    group_R = (sums_RG + gumbel(random_bits(keys_R5, first_R, sums_RG.shape[1]))).argmax(1)
    token_RL, y_RL = _tokens_of(x_RV, group_R)
    if divisor_R is not None:
        y_RL = y_RL / divisor_R[:, None]
    best_R1 = (y_RL + gumbel(random_bits(keys_R5, group_R * GROUP_TOKENS, GROUP_TOKENS))).argmax(1, keepdim=True)
    return token_RL.gather(1, best_R1).squeeze(1)


def _draw_filtered(
    x_RV: Tensor, divisor_R: Tensor | None, sums_RG: Tensor, filters: Filters, keys_R5: Tensor
) -> Tensor:
    """Draw as `_draw` does, from what the filters leave; `sums_RG` are those of the whole rows."""
    y_RV = x_RV.float() if divisor_R is None else x_RV.float() / divisor_R[:, None]
    y_RV = y_RV.masked_fill(~kept_tokens(y_RV, _logsumexp(sums_RG), filters), -torch.inf)
    return _draw(y_RV, None, group_stats(y_RV).sums_RG, keys_R5)


def _sampled_rows(ok_R: Tensor, params: SampleParams) -> Tensor:
    """Return the indexes of the rows that are not greedy."""
    sampled_R = ok_R.clone()
    if params.temperature_R is not None:
        sampled_R &= params.temperature_R != 0
    if params.top_k_R is not None:
        sampled_R &= params.top_k_R != 1
    return sampled_R.nonzero().squeeze(1)


def _draw_rows(edited_RV: Tensor, stats: GroupStats, rows: Tensor, params: SampleParams, keys_R5: Tensor) -> Tensor:
    """Draw a token for each of `rows`; `stats` are those of the edited logits."""
    every = len(rows) == len(edited_RV)
    x_RV, keys_R5 = (edited_RV, keys_R5) if every else (edited_RV[rows], keys_R5[rows])
    sums_RG, divisor_R = stats.sums_RG if every else stats.sums_RG[rows], None
    if params.temperature_R is not None:
        divisor_R = params.temperature_R.float()[rows].clamp(min=MIN_TEMPERATURE)
        sums_RG = group_stats(x_RV, divisor_R).sums_RG
    token_R = _draw(x_RV, divisor_R, sums_RG, keys_R5)
    filters = Filters.of_rows(params.top_k_R, params.top_p_R, params.min_p_R, rows, x_RV.shape[1])
    some = filters.active()
    if len(some):
        divisor = None if divisor_R is None else divisor_R[some]
        token_R[some] = _draw_filtered(x_RV[some], divisor, sums_RG[some], filters.select(some), keys_R5[some])
    return token_R


def sample_reference(logits_RV: Tensor, params: SampleParams, keys_R5: Tensor) -> SampleResult:
    """Draw in torch; see `sample`."""
    edited_RV = edit_logits(logits_RV, params)
    raw = group_stats(logits_RV)
    stats = raw if edited_RV is logits_RV else group_stats(edited_RV)
    # As in torch.amax, a NaN wins: the row is reported, not drawn from.
    ok_R = stats.tops_RG.amax(1).isfinite()
    token_R = _best(edited_RV, stats.tops_RG)
    rows = torch.empty(0, dtype=torch.long) if params.all_greedy else _sampled_rows(ok_R, params)
    if len(rows):
        token_R[rows] = _draw_rows(edited_RV, stats, rows, params, keys_R5)
    token_R = torch.where(ok_R, token_R, 0)
    logprob_R = logits_RV.gather(1, token_R[:, None]).squeeze(1).float() - _logsumexp(raw.sums_RG)
    return SampleResult(token_R, torch.where(ok_R, logprob_R, 0.0), ok_R)
