"""The torch reference of sample. Legend: R rows, V vocabulary, G groups, N entries of a list of edits."""

from __future__ import annotations

import torch
from torch import Tensor

from batchgen_kernels.philox import GROUP_DRAWS, gumbel, random_bits
from batchgen_kernels.reduction import tree_sum
from batchgen_kernels.sample_types import GROUP_TOKENS, MIN_TEMPERATURE, SampleParams, SampleResult
from batchgen_kernels.top_filters import Filters, kept_tokens

ROWS_IN_CACHE = 1 << 19
"""Elements per slice of a pass over the logits, so that its temporaries stay in the processor's cache."""


def _entries(row_N: Tensor, token_N: Tensor, *values_N: Tensor) -> tuple[Tensor, ...]:
    held = row_N >= 0
    return tuple(x[held] for x in (row_N, token_N, *values_N))


def edit_logits(logits_RV: Tensor, params: SampleParams) -> Tensor:
    """Return fp32 logits after bias, repetition, frequency and presence penalties; the input where there are none."""
    if params.bias is None and params.counts is None:
        return logits_RV
    edited_RV = logits_RV.clone()
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


def _logsumexp(x: Tensor) -> Tensor:
    """Log-sum-exp over the last dimension in the order of `tree_sum`; -inf where all terms are."""
    top = x.amax(-1, keepdim=True)
    anchor = torch.where(top == float("-inf"), 0.0, top)
    return tree_sum(torch.exp(x - anchor)).log() + anchor.squeeze(-1)


def group_logsumexp(x_RV: Tensor) -> Tensor:
    """Return the log-sum-exp of each group of GROUP_TOKENS tokens, fp32 [R, G]; the last group may be shorter."""
    num_whole = x_RV.shape[1] // GROUP_TOKENS
    whole = num_whole * GROUP_TOKENS
    columns = []
    if num_whole:
        slices = torch.split(x_RV[:, :whole], max(1, ROWS_IN_CACHE // whole))
        columns.append(torch.cat([_logsumexp(rows.reshape(-1, num_whole, GROUP_TOKENS)) for rows in slices]))
    if whole < x_RV.shape[1]:
        columns.append(_logsumexp(x_RV[:, whole:]).unsqueeze(1))
    return torch.cat(columns, dim=1)


def log_normalizer(logits_RV: Tensor) -> Tensor:
    """Return fp32 [R], the log-sum-exp of each row in the one order that log-probabilities are taken with."""
    return _logsumexp(group_logsumexp(logits_RV.float()))


def _draw(y_RV: Tensor, groups_RG: Tensor, keys_R5: Tensor) -> Tensor:
    """Draw a token id per row from softmax(y), -inf where dropped, by Gumbel-max over groups, then in the group."""
    vocabulary = y_RV.shape[1]
    first_R = torch.full((len(y_RV),), GROUP_DRAWS, device=y_RV.device)
    group_R = (groups_RG + gumbel(random_bits(keys_R5, first_R, groups_RG.shape[1]))).argmax(1)
    first_R = group_R * GROUP_TOKENS
    token_RL = first_R[:, None] + torch.arange(GROUP_TOKENS, device=y_RV.device)
    y_RL = y_RV.gather(1, token_RL.clamp(max=vocabulary - 1)).masked_fill(token_RL >= vocabulary, -torch.inf)
    best_R = (y_RL + gumbel(random_bits(keys_R5, first_R, GROUP_TOKENS))).argmax(1, keepdim=True)
    return token_RL.gather(1, best_R).squeeze(1)


def _draw_rows(edited_RV: Tensor, rows: Tensor, params: SampleParams, keys_R5: Tensor) -> Tensor:
    """Draw a token for each of `rows`: temperature, filters, then `_draw`."""
    y = edited_RV[rows]
    if params.temperature_R is not None:
        y = y / params.temperature_R.float()[rows, None].clamp(min=MIN_TEMPERATURE)
    groups = group_logsumexp(y)
    filters = Filters.of_rows(params.top_k_R, params.top_p_R, params.min_p_R, rows, y.shape[1])
    filtered = filters.active()
    if len(filtered):
        kept = y[filtered]
        kept = kept.masked_fill(~kept_tokens(kept, _logsumexp(groups[filtered]), filters.select(filtered)), -torch.inf)
        y[filtered] = kept
        groups[filtered] = group_logsumexp(kept)
    return _draw(y, groups, keys_R5[rows])


def sample_reference(logits_RV: Tensor, params: SampleParams, keys_R5: Tensor) -> SampleResult:
    """Draw in torch; see `sample`."""
    raw_RV = logits_RV.float()
    edited_RV = edit_logits(raw_RV, params)
    # As in torch.amax, a NaN wins: the row is reported, not drawn from.
    ok_R = edited_RV.amax(1).isfinite()
    token_R = edited_RV.argmax(1)
    if not params.all_greedy:
        drawn_R = ok_R.clone()
        if params.temperature_R is not None:
            drawn_R &= params.temperature_R != 0
        if params.top_k_R is not None:
            drawn_R &= params.top_k_R != 1
        rows = drawn_R.nonzero().squeeze(1)
        if len(rows):
            token_R[rows] = _draw_rows(edited_RV, rows, params, keys_R5)
    token_R = torch.where(ok_R, token_R, 0)
    logprob_R = raw_RV.gather(1, token_R[:, None]).squeeze(1) - log_normalizer(raw_RV)
    return SampleResult(token_R, torch.where(ok_R, logprob_R, 0.0), ok_R)
