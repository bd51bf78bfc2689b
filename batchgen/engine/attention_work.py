"""The plans of a step's attention: which prefixes its decodes share, and what each kernel program computes.

Shapes: S sequences, B blocks of the longest block table.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from batchgen_kernels.attention_plan import SPLIT_TOKENS, AttentionPlan, TileShape, plan_attention
from batchgen_kernels.segments import SharedPrefixes

from batchgen.engine.device import Device
from batchgen.engine.step_inputs import HostInputs, Int32


def make_plans(
    shapes: Collection[TileShape], inputs: HostInputs, tables_SB: Int32, block_size: int, device: Device
) -> dict[TileShape, AttentionPlan]:
    """One plan per kind of tiles, on the device; none where no kernel takes one."""
    if not shapes:
        return {}
    prefixes = shared_prefixes(inputs, tables_SB, block_size)
    starts, contexts = torch.from_numpy(inputs.query_starts_S1), torch.from_numpy(inputs.context_lens_S)
    plans = (plan_attention(starts, contexts, shape, prefixes=prefixes) for shape in shapes)
    return {plan.shape: plan.with_tables(device.upload(*(table.numpy() for table in plan.tables()))) for plan in plans}


def shared_prefixes(inputs: HostInputs, tables_SB: Int32, block_size: int) -> SharedPrefixes | None:
    """Groups of decodes whose first splits lie in the same blocks; None where there is none."""
    contexts = inputs.context_lens_S
    decodes = np.flatnonzero((np.diff(inputs.query_starts_S1) == 1) & (contexts > SPLIT_TOKENS))
    first_blocks = np.ascontiguousarray(tables_SB[decodes, : SPLIT_TOKENS // block_size])
    by_first: dict[bytes, list[int]] = {}
    for sequence, blocks in zip(decodes.tolist(), first_blocks, strict=True):
        by_first.setdefault(blocks.tobytes(), []).append(sequence)
    groups = [members for members in by_first.values() if len(members) > 1]
    if not groups:
        return None
    lengths = [_shared_tokens(members, contexts, tables_SB, block_size) for members in groups]
    return SharedPrefixes(
        torch.tensor([0, *np.cumsum([len(members) for members in groups])], dtype=torch.int32),
        torch.tensor([sequence for members in groups for sequence in members], dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
    )


def _shared_tokens(members: list[int], contexts: Int32, tables_SB: Int32, block_size: int) -> int:
    """Tokens in whole splits that all members share, before the query of each."""
    most = (int(contexts[members].min()) - 1) // block_size
    rows = tables_SB[members, :most]
    differs = (rows != rows[0]).any(axis=0)
    num_blocks = int(differs.argmax()) if differs.any() else most
    return num_blocks * block_size // SPLIT_TOKENS * SPLIT_TOKENS
