"""Sampling controls of many sequences as the columns that the sampling kernel takes.

Shapes: R draws, N edits of single logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from batchgen_kernels.sample import SampleParams, TokenBias, TokenCounts

from batchgen.engine.sequence import Sequence
from batchgen.sampling_params import SamplingParams

BANNED = float("-inf")


def sample_params(sequences: list[Sequence], device: torch.device) -> SampleParams:
    """Everything that decides the draws beside logits and keys."""
    params = [sequence.group.params for sequence in sequences]
    edits = edit_params(sequences, device)
    if all(each.is_greedy for each in params):
        return replace(edits, all_greedy=True)
    return replace(
        edits,
        temperature_R=_column(params, lambda p: p.temperature, 1.0, torch.float32, device),
        top_k_R=_column(params, lambda p: p.top_k or 0, 0, torch.int64, device),
        top_p_R=_column(params, lambda p: p.top_p, 1.0, torch.float32, device),
        min_p_R=_column(params, lambda p: p.min_p, 0.0, torch.float32, device),
    )


def edit_params(sequences: list[Sequence], device: torch.device) -> SampleParams:
    """What edits the logits: biases, bans and penalties; columns that no sequence uses stay None."""
    params = [sequence.group.params for sequence in sequences]
    return SampleParams(
        repetition_penalty_R=_column(params, lambda p: p.repetition_penalty, 1.0, torch.float32, device),
        presence_penalty_R=_column(params, lambda p: p.presence_penalty, 0.0, torch.float32, device),
        frequency_penalty_R=_column(params, lambda p: p.frequency_penalty, 0.0, torch.float32, device),
        bias=_bias(sequences, device),
        counts=_counts(sequences, device),
    )


def _column(
    params: list[SamplingParams],
    value: Callable[[SamplingParams], float],
    neutral: float,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor | None:
    """One value per row; None where all rows have the neutral one, so that its pass over the logits is left out."""
    values = [value(each) for each in params]
    if all(each == neutral for each in values):
        return None
    return torch.tensor(values, dtype=dtype, device=device)


def _bias(sequences: list[Sequence], device: torch.device) -> TokenBias | None:
    rows: list[int] = []
    token_ids: list[int] = []
    values: list[float] = []
    for row, sequence in enumerate(sequences):
        bias = _bias_of(sequence)
        rows.extend([row] * len(bias))
        token_ids.extend(bias.keys())
        values.extend(bias.values())
    if not rows:
        return None
    return TokenBias(
        torch.tensor(rows, device=device),
        torch.tensor(token_ids, device=device),
        torch.tensor(values, dtype=torch.float32, device=device),
    )


def _bias_of(sequence: Sequence) -> dict[int, float]:
    group = sequence.group
    bias = group.params.logit_bias
    bans: list[int] = []
    if sequence.num_generated < group.params.min_tokens:
        bans.extend(group.stop_token_ids)
    for *begun, last in group.bad_words:
        # A word of several tokens is stopped at its last one.
        if not begun or sequence.token_ids[-len(begun) :].tolist() == begun:
            bans.append(last)
    return {**bias, **dict.fromkeys(bans, BANNED)} if bans else bias


def _counts(sequences: list[Sequence], device: torch.device) -> TokenCounts | None:
    seen = [(row, s.history) for row, s in enumerate(sequences) if s.history is not None]
    if not seen:
        return None
    sizes = [len(history.token_ids) for _, history in seen]
    return TokenCounts(
        torch.from_numpy(np.repeat([row for row, _ in seen], sizes)).to(device),
        torch.from_numpy(np.concatenate([history.token_ids for _, history in seen])).to(device),
        torch.from_numpy(np.concatenate([history.output_counts for _, history in seen])).to(device),
    )
