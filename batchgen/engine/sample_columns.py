"""Sampling controls of many sequences as the columns that the sampling kernels take.

Shapes: R draws, N edits of single logits. Work is per sequence or per distinct parameters, never per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import torch
from batchgen_kernels.sample import SampleParams, TokenBias, TokenCounts
from numpy.typing import NDArray

from batchgen.engine.sequence import Sequence
from batchgen.sampling_params import SamplingParams

ParamsOf: TypeAlias = tuple[list[SamplingParams], NDArray[np.int64]]
"""Distinct parameters, and which of them each row has."""


def sample_params(sequences: list[Sequence], device: torch.device) -> SampleParams:
    """Everything that decides the draws beside logits and keys."""
    params = _distinct(sequences)
    edits = _edits(sequences, params, device)
    if all(each.is_greedy for each in params[0]):
        return replace(edits, all_greedy=True)
    return replace(
        edits,
        temperature_R=_column(params, lambda p: p.temperature, 1.0, np.float32, device),
        top_k_R=_column(params, lambda p: p.top_k or 0, 0, np.int64, device),
        top_p_R=_column(params, lambda p: p.top_p, 1.0, np.float32, device),
        min_p_R=_column(params, lambda p: p.min_p, 0.0, np.float32, device),
    )


def edit_params(sequences: list[Sequence], device: torch.device) -> SampleParams:
    """What edits the logits: biases, bans and penalties; columns that no sequence uses stay None."""
    return _edits(sequences, _distinct(sequences), device)


def keys_of(sequences: list[Sequence], device: torch.device) -> torch.Tensor:
    """int64 [R, 5]: seed, source, row, sample, position; position counts the generated tokens."""
    keys = [(s.group.seed, s.group.source, s.group.row, s.sample, s.num_generated) for s in sequences]
    return torch.from_numpy(np.array(keys, dtype=np.int64)).to(device)


def _distinct(sequences: list[Sequence]) -> ParamsOf:
    # All rows of a job have one and the same object.
    index_of: dict[int, int] = {}
    distinct: list[SamplingParams] = []
    rows = np.zeros(len(sequences), np.int64)
    for row, sequence in enumerate(sequences):
        params = sequence.group.params
        index = index_of.setdefault(id(params), len(distinct))
        if index == len(distinct):
            distinct.append(params)
        rows[row] = index
    return distinct, rows


def _edits(sequences: list[Sequence], params: ParamsOf, device: torch.device) -> SampleParams:
    return SampleParams(
        repetition_penalty_R=_column(params, lambda p: p.repetition_penalty, 1.0, np.float32, device),
        presence_penalty_R=_column(params, lambda p: p.presence_penalty, 0.0, np.float32, device),
        frequency_penalty_R=_column(params, lambda p: p.frequency_penalty, 0.0, np.float32, device),
        bias=_bias(sequences, device),
        counts=_counts(sequences, device),
    )


def _column(
    params: ParamsOf,
    value: Callable[[SamplingParams], float],
    neutral: float,
    dtype: type[np.float32 | np.int64],
    device: torch.device,
) -> torch.Tensor | None:
    """One value per row; None where all rows have the neutral one, so that its pass over the logits is left out."""
    distinct, rows = params
    values = [value(each) for each in distinct]
    if all(each == neutral for each in values):
        return None
    return torch.from_numpy(np.array(values, dtype=dtype)[rows]).to(device)


def _bias(sequences: list[Sequence], device: torch.device) -> TokenBias | None:
    biased = [(row, entries) for row, s in enumerate(sequences) if len((entries := s.group.edits.bias_of(s)).token_ids)]
    if not biased:
        return None
    return TokenBias(
        torch.from_numpy(np.repeat([row for row, _ in biased], [len(each.token_ids) for _, each in biased])).to(device),
        torch.from_numpy(np.concatenate([each.token_ids for _, each in biased])).to(device),
        torch.from_numpy(np.concatenate([each.values for _, each in biased])).to(device),
    )


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
