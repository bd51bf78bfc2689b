"""Draws one token for every sequence that a step brought to its last token.

Shapes: L logits rows of the step, R draws (several may share a logits row), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from batchgen_kernels.sample import SampleParams, sample

from batchgen.engine.sequence import Sequence
from batchgen.sampling_params import SamplingParams


class Draws(NamedTuple):
    """One entry per drawn token, in the order of the sequences given."""

    token_ids: list[int]
    logprobs: list[float]
    """Raw: before temperature and filters."""
    ok: list[bool]
    """False where every token was masked, or the logits were not finite."""


class Sampler:
    """Turns logits into tokens; a draw depends on its own logits, parameters and key alone."""

    def sample(self, logits_LV: torch.Tensor, rows: list[int], sequences: list[Sequence]) -> Draws:
        """Draw for each sequence from the logits row beside it."""
        if not sequences:
            return Draws([], [], [])
        device = logits_LV.device
        # Most steps use every row once, in order; then nothing is gathered.
        logits_RV = logits_LV if rows == list(range(len(logits_LV))) else logits_LV[torch.tensor(rows, device=device)]
        params = [sequence.group.params for sequence in sequences]
        result = sample(logits_RV, _columns(params, device), _keys(sequences, device))
        return Draws(result.token_ids_R.tolist(), result.logprobs_R.tolist(), result.ok_R.tolist())


def _keys(sequences: list[Sequence], device: torch.device) -> torch.Tensor:
    """int64 [R, 5]: seed, source, row, sample, position; position counts the generated tokens."""
    keys = [(s.group.seed, s.group.source, s.group.row, s.sample, s.num_generated) for s in sequences]
    return torch.tensor(keys, dtype=torch.int64, device=device)


def _columns(params: list[SamplingParams], device: torch.device) -> SampleParams:
    if all(each.is_greedy for each in params):
        return SampleParams(all_greedy=True)
    return SampleParams(
        temperature_R=_column(params, lambda p: p.temperature, 1.0, torch.float32, device),
        top_k_R=_column(params, lambda p: p.top_k or 0, 0, torch.int64, device),
        top_p_R=_column(params, lambda p: p.top_p, 1.0, torch.float32, device),
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
