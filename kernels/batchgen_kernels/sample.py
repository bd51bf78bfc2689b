"""sample: draw one token per row from its logits.

Legend: R rows, V vocabulary, G groups of GROUP_TOKENS neighbouring token ids, N entries of a list of edits.

    edited = (logits + bias) after the penalties;  y = edited / temperature;  top-k, top-p, min-p drop tokens
    group  = argmax_g logsumexp(y of g's kept tokens) + gumbel(g);  token = argmax of y + gumbel over its kept tokens
The two steps draw exactly from softmax(y): a group comes up with its share of the mass, a token with its share of the
group. They need V / 256 + 256 random numbers, not V, and a last-bit difference in y changes a token only where the two
best perturbed scores of a step all but tie. No row's result depends on another row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from batchgen_kernels.philox import GROUP_DRAWS, gumbel, random_bits
from batchgen_kernels.reduction import tree_sum
from batchgen_kernels.top_filters import Filters, kept_tokens

GROUP_TOKENS = 256
"""Token ids per group; part of the fingerprint: other values draw other tokens."""

MIN_TEMPERATURE = 1e-30
"""Lower ones (but 0) act as this, so that no score overflows."""

ROWS_IN_CACHE = 1 << 19
"""Elements per slice of a pass over the logits, so that its temporaries stay in the processor's cache."""


class TokenBias(NamedTuple):
    """Values added to logits, -inf to ban; one entry per (row, token) at most, row -1 skips an entry."""

    row_N: Tensor
    token_N: Tensor
    value_N: Tensor


class TokenCounts(NamedTuple):
    """The tokens that stand in each row's context, for the penalties; one entry per (row, token) at most.

    row_N, token_N (int64; row -1 skips an entry); output_count_N (int32): times generated, 0 if only in the prompt.
    """

    row_N: Tensor
    token_N: Tensor
    output_count_N: Tensor


@dataclass(frozen=True)
class SampleParams:
    """Sampling controls, one entry per row; None where no row uses one."""

    temperature_R: Tensor | None = None
    """fp32; 0: argmax, the lowest id on ties; None: 1."""
    top_k_R: Tensor | None = None
    """Integers; 0, negative and V or more keep all; 1: argmax, the lowest id on ties."""
    top_p_R: Tensor | None = None
    """fp32; 1 keeps all."""
    min_p_R: Tensor | None = None
    """fp32; 0 keeps all."""
    repetition_penalty_R: Tensor | None = None
    """fp32; divides positive logits of tokens in prompt or output, multiplies negative ones; 1: none."""
    presence_penalty_R: Tensor | None = None
    """fp32; taken off the logits of generated tokens; 0: none."""
    frequency_penalty_R: Tensor | None = None
    """fp32; taken off once for each time a token was generated; 0: none."""
    bias: TokenBias | None = None
    counts: TokenCounts | None = None
    """Needed where there are penalties."""
    all_greedy: bool = False
    """Every row is greedy, as the host knows; temperature, top_* and min_p are not read."""


class SampleResult(NamedTuple):
    """What was drawn; where `ok_R` is False (all tokens masked, or logits not finite) token and logprob are 0."""

    token_ids_R: Tensor
    """int64."""
    logprobs_R: Tensor
    """fp32: log-softmax of the logits as the model gave them, before bias, penalties, temperature and filters."""
    ok_R: Tensor
    """bool."""


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
    logprob_R = raw_RV.gather(1, token_R[:, None]).squeeze(1) - _logsumexp(group_logsumexp(raw_RV))
    return SampleResult(token_R, torch.where(ok_R, logprob_R, 0.0), ok_R)


def sample(logits_RV: Tensor, params: SampleParams, keys_R5: Tensor) -> SampleResult:
    """Draw one token per row; `logits_RV` is not changed.

    `keys_R5` (int64) keys the random numbers: seed, source, row, sample, position (`batchgen_kernels.philox`).
    """
    return sample_reference(logits_RV, params, keys_R5)
