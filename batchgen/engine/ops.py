"""Which implementation of each kernel of cache and sampling serves a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from batchgen_kernels import copy_blocks, cpu, paged_attention, sample, store_kv, top_tokens
from batchgen_kernels.sample import SampleParams, SampleResult
from batchgen_kernels.top_tokens import TokenRanks, TopTokens


class Ops(NamedTuple):
    """The kernels; signatures and formulas stand in `batchgen_kernels`, one file per op."""

    store_kv: Callable[..., None]
    copy_blocks: Callable[..., None]
    paged_attention: Callable[..., torch.Tensor]
    sample_steps: Callable[[SampleParams, torch.Tensor], Callable[[torch.Tensor], SampleResult]]
    """`SampleSteps`: of parameters and keys it makes what draws step after step."""
    top_tokens: Callable[..., TopTokens]
    token_ranks: Callable[..., TokenRanks]
    takes_plan: bool = False
    """Whether paged_attention takes a plan, made once per step for all layers."""


REFERENCE = Ops(
    store_kv.store_kv,
    copy_blocks.copy_blocks,
    paged_attention.paged_attention,
    sample.SampleSteps,
    top_tokens.top_tokens,
    top_tokens.token_ranks,
)


def select_ops(device: torch.device) -> Ops:
    """The C++ twins on a processor where they are built; else each op's own choice, which on a processor is torch."""
    if device.type != "cpu":
        return REFERENCE._replace(takes_plan=True)
    if cpu.is_available():
        return Ops(cpu.store_kv, cpu.copy_blocks, cpu.paged_attention, cpu.SampleSteps, cpu.top_tokens, cpu.token_ranks)
    return REFERENCE
