"""Decode steps of a few sizes, each recorded once and then done again: the host launches one thing instead of hundreds.

A step of fewer sequences is padded to the next size; the sequences added to it read one slot and write nowhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from batchgen_kernels.attention_plan import AttentionPlan, TileShape, reserve_plan, update_plan

from batchgen.engine.device import Device
from batchgen.engine.step_inputs import BlockTables, HostInputs, StepInputs, StepTokens

SPLITS_PER_SEQUENCE = 32
MAX_SPLITS = 8192
"""Room in a recorded step's plan: contexts of 8,192 tokens on average, of 2,048 where 1,024 sequences run. Steps that
need more are launched kernel by kernel."""


class Recorded(NamedTuple):
    """A step of one size: the tensors that it reads, whose contents change, and how to run it."""

    tokens: StepTokens
    inputs: StepInputs
    tables: torch.Tensor
    run: Callable[[], torch.Tensor]


class DecodeSteps:
    """The recorded steps, made as they are needed."""

    def __init__(
        self, device: Device, tables: BlockTables, forward: Callable[[StepTokens, StepInputs], torch.Tensor]
    ) -> None:
        self._device = device
        self._tables = tables
        self._forward = forward
        self._recorded: dict[int, Recorded] = {}

    def size_for(self, inputs: HostInputs) -> int | None:
        """The size that a step is padded to; None where it is no decode, or larger than all sizes."""
        sizes = self._device.decode_buckets
        index = bisect_left(sizes, len(inputs.input_ids_T))
        return sizes[index] if index < len(sizes) and inputs.is_decode else None

    def run(
        self,
        padded: HostInputs,
        plans: dict[TileShape, AttentionPlan],
        feed: Callable[[torch.Tensor], None],
    ) -> torch.Tensor | None:
        """Logits of all sequences of a padded step; `feed` fills in the ids that only the device knows.

        None where its contexts, or the prefixes that they share, are too long for a recorded step.
        """
        size = len(padded.input_ids_T)
        if not all(_fits(plan, size) for plan in plans.values()):
            return None
        arrays = (padded.input_ids_T, padded.positions_T, padded.wanted_R, padded.slots_T)
        sent = self._device.upload(*arrays, padded.query_starts_S1, padded.context_lens_S)
        recorded = self._recorded.get(size)
        if recorded is None or recorded.tables is not self._tables.on_device:
            feed(sent[0])
            recorded = self._recorded[size] = self._record(sent, plans)
            return recorded.run()
        into = (
            *recorded.tokens,
            recorded.inputs.slots_T,
            recorded.inputs.query_starts_S1,
            recorded.inputs.context_lens_S,
        )
        for static, new in zip(into, sent, strict=True):
            static.copy_(new)
        feed(recorded.tokens.input_ids_T)
        for shape, plan in plans.items():
            update_plan(recorded.inputs.plans[shape], plan)
        return recorded.run()

    def _record(self, sent: list[torch.Tensor], plans: dict[TileShape, AttentionPlan]) -> Recorded:
        tokens = StepTokens(*sent[:3])
        slots_T, query_starts_S1, context_lens_S = sent[3:]
        size = len(slots_T)
        inputs = StepInputs(slots_T, self._tables.on_device[:size], query_starts_S1, context_lens_S)
        for shape, plan in plans.items():
            inputs.plans[shape] = _room_for(shape, size, self._device.where)
            update_plan(inputs.plans[shape], plan)
        # Layers may keep with a step's inputs what they make of their contents: those are others every time.
        run = self._device.record(lambda: self._forward(tokens, replace(inputs)))
        return Recorded(tokens, inputs, self._tables.on_device, run)


def _num_splits(size: int) -> int:
    return min(size * SPLITS_PER_SEQUENCE, MAX_SPLITS)


def _fits(plan: AttentionPlan, size: int) -> bool:
    return plan.num_slots <= _num_splits(size) and len(plan.prefix_items_Y3) <= size


def _room_for(shape: TileShape, size: int, where: torch.device) -> AttentionPlan:
    # A program is started for each prefix item that there is room for, also where nothing is shared: few are enough.
    return reserve_plan(shape, num_sequences=size, num_splits=_num_splits(size), num_prefix_items=size, device=where)
