"""Sampling controls of many sequences as the columns that the sampling kernels take.

Shapes: R draws, N edits of single logits. Work is per sequence or per distinct parameters, never per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from batchgen_kernels.sample import SampleParams, SampleResult, TokenBias, TokenCounts

from batchgen.engine.device import Device
from batchgen.engine.ops import Ops
from batchgen.engine.sequence import Sequence, SequenceGroup
from batchgen.sampling_params import SamplingParams

_LEAST_TOP_P = 1e-30

ParamsOf: TypeAlias = tuple[list[SequenceGroup], list[int]]
"""One group for each of the distinct parameters, and which of them each row has."""


def sample_params(sequences: list[Sequence], device: Device) -> SampleParams:
    """Everything that decides the draws beside logits and keys."""
    params = _distinct(sequences)
    edits = _edits(sequences, params, device)
    if all(group.params.is_greedy for group in params[0]):
        return replace(edits, all_greedy=True)
    return replace(
        edits,
        temperature_R=_column(params, lambda p: p.temperature, 1.0, np.float32, device),
        top_k_R=_column(params, lambda p: p.top_k or 0, 0, np.int64, device),
        # A smaller one would be 0 in float32, which keeps all.
        top_p_R=_column(params, lambda p: max(p.top_p, _LEAST_TOP_P), 1.0, np.float32, device),
        min_p_R=_column(params, lambda p: p.min_p, 0.0, np.float32, device),
    )


def edit_params(sequences: list[Sequence], device: Device) -> SampleParams:
    """What edits the logits: biases, bans and penalties; columns that no sequence uses stay None."""
    return _edits(sequences, _distinct(sequences), device)


def keys_of(sequences: list[Sequence], device: Device) -> torch.Tensor:
    """int64 [R, 5]: seed, source, row, sample, position; position counts the generated tokens."""
    keys = [(s.group.seed, s.group.source, s.group.row, s.sample, s.num_generated) for s in sequences]
    return device.upload(np.array(keys, dtype=np.int64))[0]


class StepDraws(NamedTuple):
    """How the next token of each sequence is drawn."""

    sample: Callable[[torch.Tensor], SampleResult]
    """Of the step's logits [R, V]; called once a step."""
    tops: list[int | None]
    """Per draw: how many other tokens are wanted with it; None: no log-probabilities."""


class SamplingColumns:
    """The columns of one step after the other, kept on the device.

    Where the sequences of the step before draw again, and nothing edits their logits, nothing is made or sent.
    """

    def __init__(self, ops: Ops, device: Device) -> None:
        self._ops = ops
        self._device = device
        self._sequences: list[Sequence] = []
        self._draws: StepDraws | None = None
        """Of the step before, where the next one may go on with them."""
        self._next_position = 0

    def of(self, sequences: list[Sequence]) -> StepDraws:
        """The draws of the next token of each sequence."""
        position = sequences[0].num_generated
        draws = self._draws
        # A step that failed is forgotten as a whole: the first sequence tells whether all got on.
        if draws is None or position != self._next_position or sequences != self._sequences:
            params = sample_params(sequences, self._device)
            keys_R5 = keys_of(sequences, self._device)
            tops = [sequence.group.params.logprobs for sequence in sequences]
            draws = StepDraws(self._ops.sample_steps(params, keys_R5), tops)
            # What follows the text may edit the next step's logits, and a grammar get on by more than the token drawn.
            is_constant = _is_constant(params) and not any(each.group.draws_follow_text for each in sequences)
            self._draws, self._sequences = (draws, sequences) if is_constant else (None, [])
        self._next_position = position + 1
        return draws


def _is_constant(params: SampleParams) -> bool:
    return all(getattr(params, each.name) is None for each in fields(SampleParams) if each.name not in _CONSTANT)


_CONSTANT = {"temperature_R", "top_k_R", "top_p_R", "min_p_R", "all_greedy"}
"""The columns that are the same in every step of a sequence."""


def _distinct(sequences: list[Sequence]) -> ParamsOf:
    # All rows of a job have one and the same object.
    index_of: dict[int, int] = {}
    distinct: list[SequenceGroup] = []
    rows: list[int] = []
    for sequence in sequences:
        group = sequence.group
        index = index_of.setdefault(id(group.params), len(distinct))
        if index == len(distinct):
            distinct.append(group)
        rows.append(index)
    return distinct, rows


def _edits(sequences: list[Sequence], params: ParamsOf, device: Device) -> SampleParams:
    # What a group edits follows from its parameters.
    if not any(group.params.has_penalties or group.edits.is_active for group in params[0]):
        return SampleParams()
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
    device: Device,
) -> torch.Tensor | None:
    """One value per row; None where all rows have the neutral one, so that its pass over the logits is left out."""
    distinct, rows = params
    values = [value(group.params) for group in distinct]
    if all(each == neutral for each in values):
        return None
    return device.upload(np.array(values, dtype=dtype)[rows])[0]


def _bias(sequences: list[Sequence], device: Device) -> TokenBias | None:
    biased = [(row, entries) for row, s in enumerate(sequences) if len((entries := s.group.edits.bias_of(s)).token_ids)]
    if not biased:
        return None
    return TokenBias(
        *device.upload(
            np.repeat([row for row, _ in biased], [len(each.token_ids) for _, each in biased]),
            np.concatenate([each.token_ids for _, each in biased]),
            np.concatenate([each.values for _, each in biased]),
        )
    )


def _counts(sequences: list[Sequence], device: Device) -> TokenCounts | None:
    seen = [(row, s.history) for row, s in enumerate(sequences) if s.history is not None]
    if not seen:
        return None
    sizes = [len(history.token_ids) for _, history in seen]
    return TokenCounts(
        *device.upload(
            np.repeat([row for row, _ in seen], sizes),
            np.concatenate([history.token_ids for _, history in seen]),
            np.concatenate([history.output_counts for _, history in seen]),
        )
    )
