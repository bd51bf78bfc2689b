"""Controls and keys of draws, for the tests of sample and its twins."""

from __future__ import annotations

from dataclasses import replace

import torch
from batchgen_kernels.sample import SampleParams, TokenBias, TokenCounts


def keys(num_rows: int, seed: int = 7) -> torch.Tensor:
    """Keys of rows 0, 1, ... of one seed."""
    table = torch.zeros(num_rows, 5, dtype=torch.long)
    table[:, 0], table[:, 2] = seed, torch.arange(num_rows)
    return table


def mixed_params(num_rows: int) -> SampleParams:
    """A different mix of controls in each row, greedy rows among them."""
    row = torch.arange(num_rows)
    return SampleParams(
        temperature_R=torch.tensor([0.0, 1.0, 0.7, 1.3])[row % 4],
        top_k_R=torch.tensor([0, 40, -1, 1, 3])[row % 5],
        top_p_R=torch.tensor([1.0, 0.9, 0.5])[row % 3],
        min_p_R=torch.tensor([0.0, 0.02])[row % 2],
        repetition_penalty_R=torch.tensor([1.0, 1.3])[row % 2],
        presence_penalty_R=torch.tensor([0.0, 0.5, -0.5])[row % 3],
        frequency_penalty_R=torch.tensor([0.0, 0.25])[row % 2],
        bias=TokenBias(row.clone(), torch.full((num_rows,), 5), torch.full((num_rows,), -torch.inf)),
        counts=TokenCounts(row.repeat(2), torch.tensor([3, 8]).repeat_interleave(num_rows), (row % 4).repeat(2).int()),
    )


def rows_of(params: SampleParams, rows: torch.Tensor) -> SampleParams:
    """The same controls for some of the rows, renumbered."""
    place = {int(row): index for index, row in enumerate(rows)}

    def renumber(entries: TokenBias | TokenCounts | None) -> list[torch.Tensor]:
        assert entries is not None
        row_N = torch.tensor([place.get(int(row), -1) for row in entries[0]])
        return [row_N, entries[1], entries[2]]

    vectors = {name: value[rows] for name, value in vars(params).items() if name.endswith("_R") and value is not None}
    return replace(
        params, **vectors, bias=TokenBias(*renumber(params.bias)), counts=TokenCounts(*renumber(params.counts))
    )
