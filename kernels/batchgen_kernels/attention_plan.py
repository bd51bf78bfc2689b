"""The work of one step's attention, cut into items on the host: the same for every layer of a kind.

A decode (a sequence with one query) is cut along its context into splits of SPLIT_TOKENS, counted from its first token,
so that a few long sequences fill the device too and so that the cut never depends on the batch. Sequences with more
queries are cut into tiles of neighbouring queries. Whole splits that lie in a shared prefix are computed once for as
many members of the group as a tile holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen_kernels.launch import next_power_of_2
from batchgen_kernels.segments import SharedPrefixes

SPLIT_TOKENS = 256
"""Tokens per split, a multiple of SEGMENT_TOKENS."""

Integers = npt.NDArray[np.int64]


class TileShape(NamedTuple):
    """How attention is tiled for a model's heads; a tile's rows are (query, head of the group) pairs."""

    group: int
    """Query heads per KV head."""
    decode_rows: int
    prefill_rows: int
    prefix_rows: int
    keys: int
    deterministic: bool
    """Chunks are computed in a decode's tiles and splits, so that a query's bits do not depend on its chunk."""

    @property
    def queries_per_tile(self) -> int:
        """Neighbouring queries of one sequence that a tile of a prompt chunk holds."""
        return max(1, self.prefill_rows // self.group)

    @property
    def members_per_tile(self) -> int:
        """Sequences of a group that a tile of a shared prefix holds."""
        return max(1, self.prefix_rows // self.group)


def tile_shape(num_heads: int, num_kv_heads: int, head_dim: int, *, deterministic: bool = False) -> TileShape:
    """Choose the tiles for heads of `head_dim` (the larger of keys and values); tl.dot needs 16 rows at least."""
    group = num_heads // num_kv_heads
    decode_rows = max(16, next_power_of_2(group))
    large = max(decode_rows, 64 if head_dim > 128 else 128)
    return TileShape(
        group=group,
        decode_rows=decode_rows,
        prefill_rows=decode_rows if deterministic else large,
        prefix_rows=decode_rows if deterministic else max(decode_rows, 64),
        keys=64 if head_dim <= 128 else 32,
        deterministic=deterministic,
    )


class AttentionPlan(NamedTuple):
    """The items of one call, int32 on the device; tables may be longer than their counts, for graphs to replay."""

    counts_4: Tensor
    """How many decode items, merged sequences, prefill items and prefix items there are."""
    decode_items_W2: Tensor
    """(sequence, split) of each split of a decode that no group computes."""
    decode_sequences_C: Tensor
    """Sequences with one query."""
    prefill_items_X2: Tensor
    """(sequence, first query of the tile) for sequences with several queries, the longest contexts first."""
    prefix_items_Y3: Tensor
    """(first member, end of the group's members, split) of each tile of a shared prefix."""
    members_M: Tensor
    """The sequences of the groups; prefix items index into it."""
    slot_starts_S: Tensor
    """The partial result of sequence s and split j is in slot slot_starts[s] + j."""
    num_slots: int
    shape: TileShape

    def tables(self) -> list[Tensor]:
        """All tensors of the plan."""
        return [part for part in self if isinstance(part, Tensor)]

    def with_tables(self, tables: Sequence[Tensor]) -> AttentionPlan:
        """Return the same plan with other tensors, in the order of `tables`."""
        names = [name for name, part in self._asdict().items() if isinstance(part, Tensor)]
        others: dict[str, Any] = dict(zip(names, tables, strict=True))
        return self._replace(**others)


def _decode_items(contexts_S: Integers, shared_S: Integers, decodes_C: Integers) -> tuple[Integers, Integers, int]:
    """Return the (sequence, split) items, the first slot of each sequence, and the number of slots."""
    splits_S = np.zeros_like(contexts_S)
    splits_S[decodes_C] = -(-contexts_S[decodes_C] // SPLIT_TOKENS)
    slot_starts_S = np.cumsum(splits_S) - splits_S
    own_S = np.maximum(splits_S - shared_S, 0)
    sequence_W = np.repeat(np.arange(len(own_S)), own_S)
    split_W = np.arange(len(sequence_W)) - (np.cumsum(own_S) - own_S)[sequence_W] + shared_S[sequence_W]
    return np.stack((sequence_W, split_W), axis=1), slot_starts_S, int(splits_S.sum())


def _prefill_items(counts_S: Integers, contexts_S: Integers, queries_per_tile: int) -> Integers:
    """Return the (sequence, first query) items, those with the most keys in sight first."""
    tiles_S = np.where(counts_S > 1, -(-counts_S // queries_per_tile), 0)
    sequence_X = np.repeat(np.arange(len(tiles_S)), tiles_S)
    tile_X = np.arange(len(sequence_X)) - (np.cumsum(tiles_S) - tiles_S)[sequence_X]
    keys_X = contexts_S[sequence_X] - counts_S[sequence_X] + (tile_X + 1) * queries_per_tile
    order = np.argsort(-keys_X, kind="stable")
    return np.stack((sequence_X, tile_X * queries_per_tile), axis=1)[order]


class _Groups(NamedTuple):
    """The shared prefixes that decodes make use of."""

    shared_S: Integers
    """Splits of each sequence that its group computes."""
    members_M: Integers
    items_Y3: Integers


def _groups(prefixes: SharedPrefixes | None, counts_S: Integers, members_per_tile: int) -> _Groups:
    """Keep the members that are decodes, and groups with two of them at least."""
    shared_S = np.zeros_like(counts_S)
    members: list[int] = []
    items: list[tuple[int, int, int]] = []
    if prefixes is not None:
        starts, everyone = prefixes.member_starts_G1.tolist(), prefixes.members_M.tolist()
        for group, length in enumerate(prefixes.prefix_lens_G.tolist()):
            decodes = [s for s in everyone[starts[group] : starts[group + 1]] if counts_S[s] == 1]
            splits = length // SPLIT_TOKENS
            if len(decodes) < 2 or splits == 0:
                continue
            first, end = len(members), len(members) + len(decodes)
            members += decodes
            shared_S[decodes] = splits
            items += [(tile, end, j) for tile in range(first, end, members_per_tile) for j in range(splits)]
    return _Groups(shared_S, np.array(members, np.int64), np.array(items, np.int64).reshape(-1, 3))


def plan_attention(
    query_starts_S1: Tensor | Sequence[int],
    context_lens_S: Tensor | Sequence[int],
    shape: TileShape,
    *,
    prefixes: SharedPrefixes | None = None,
    device: torch.device | None = None,
) -> AttentionPlan:
    """Cut a step's attention into items. Reads its inputs on the host: device tensors would make it wait."""
    starts, contexts = (
        np.asarray(x if isinstance(x, Sequence) else x.cpu(), np.int64) for x in (query_starts_S1, context_lens_S)
    )
    counts = np.diff(starts)
    groups = _groups(prefixes, counts, shape.members_per_tile)
    decodes = np.flatnonzero(counts == 1)
    items, slot_starts, num_slots = _decode_items(contexts, groups.shared_S, decodes)
    prefill = _prefill_items(counts, contexts, shape.queries_per_tile)
    sizes = np.array([len(items), len(decodes), len(prefill), len(groups.items_Y3)])

    def upload(table: Integers) -> Tensor:
        return torch.from_numpy(table.astype(np.int32)).to(device)

    return AttentionPlan(
        counts_4=upload(sizes),
        decode_items_W2=upload(items),
        decode_sequences_C=upload(decodes),
        prefill_items_X2=upload(prefill),
        prefix_items_Y3=upload(groups.items_Y3),
        members_M=upload(groups.members_M),
        slot_starts_S=upload(slot_starts),
        num_slots=num_slots,
        shape=shape,
    )


def reserve_plan(
    shape: TileShape, *, num_sequences: int, num_splits: int, num_prefix_items: int = 0, device: torch.device
) -> AttentionPlan:
    """Return an empty plan with room for decodes alone, whose tensors a CUDA graph may hold; `update_plan` fills it."""

    def table(*size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, device=device)

    return AttentionPlan(
        counts_4=table(4),
        decode_items_W2=table(num_splits, 2),
        decode_sequences_C=table(num_sequences),
        prefill_items_X2=table(0, 2),
        prefix_items_Y3=table(num_prefix_items, 3),
        members_M=table(num_sequences),
        slot_starts_S=table(num_sequences),
        num_slots=num_splits,
        shape=shape,
    )


def update_plan(reserved: AttentionPlan, plan: AttentionPlan) -> None:
    """Copy a plan into a reserved one, in place; ValueError where it does not fit."""
    if plan.num_slots > reserved.num_slots or plan.shape != reserved.shape:
        raise ValueError(f"{plan.num_slots} splits do not fit into a plan of {reserved.num_slots}, or its tiles differ")
    tables = list(zip(reserved.tables(), plan.tables(), strict=True))
    if any(len(of) > len(into) for into, of in tables):
        raise ValueError("the plan does not fit into the reserved one: more sequences, prefix items or prompt chunks")
    for into, of in tables:
        into[: len(of)] = of
