"""What one step tells the model and its attention: made on the host, sent to the device together.

Shapes: T tokens, S chunks (one per scheduled sequence), B blocks of the longest block table, R logits rows.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from batchgen_kernels import cpu
from batchgen_kernels.attention_plan import AttentionPlan, TileShape
from numpy.typing import NDArray

from batchgen.engine.batch import Batch
from batchgen.engine.block_table import BlockTable
from batchgen.engine.device import Device

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(slots=True)
class StepInputs:
    """Where the step's tokens stand; the same for every layer."""

    slots_T: torch.Tensor
    """int64; the cache slot that each token's K and V go to; -1: nowhere."""
    block_tables_SB: torch.Tensor
    """int32; block ids of each sequence, then anything."""
    query_starts_S1: torch.Tensor
    """int32; first flattened token of each sequence, and T."""
    context_lens_S: torch.Tensor
    """int32; tokens of each sequence that exist once the step is written."""
    plans: dict[TileShape, AttentionPlan] = field(default_factory=dict)
    """For kernels that take one: the items of their work, by the tiles of a layer's heads."""
    _decoder_step: cpu.DecoderStep | None = None

    def decoder_step(self) -> cpu.DecoderStep:
        """The same for the C++ decoder layers, made once."""
        if self._decoder_step is None:
            self._decoder_step = cpu.DecoderStep(
                self.slots_T, self.block_tables_SB, self.query_starts_S1, self.context_lens_S
            )
        return self._decoder_step


class StepTokens(NamedTuple):
    """What the model itself takes; all int64."""

    input_ids_T: torch.Tensor
    positions_T: torch.Tensor
    wanted_R: torch.Tensor
    """The tokens whose logits are computed."""


class HostInputs(NamedTuple):
    """A step as arrays."""

    input_ids_T: Int64
    """0 where the token is fed on the device."""
    positions_T: Int64
    wanted_R: Int64
    slots_T: Int64
    query_starts_S1: Int32
    context_lens_S: Int32
    fed_tokens_F: Int64
    """Flattened tokens whose ids the device alone knows."""
    fed_draws_F: Int64
    """For each of them its draw in the step before."""

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one token, and the logits of all are wanted, in their order."""
        num_tokens = len(self.input_ids_T)
        return len(self.context_lens_S) == num_tokens and np.array_equal(self.wanted_R, np.arange(num_tokens))

    def padded(self, size: int) -> HostInputs:
        """A step of decodes as one of `size`: sequences of one token are added, whose K and V go nowhere."""
        extra = size - len(self.input_ids_T)
        return self._replace(
            input_ids_T=np.pad(self.input_ids_T, (0, extra)),
            positions_T=np.pad(self.positions_T, (0, extra)),
            wanted_R=np.arange(size),
            slots_T=np.pad(self.slots_T, (0, extra), constant_values=-1),
            query_starts_S1=np.arange(size + 1, dtype=np.int32),
            context_lens_S=np.pad(self.context_lens_S, (0, extra), constant_values=1),
        )


class BlockTables:
    """The block tables of each step's sequences, kept on the device: rows that are as they were are not sent again."""

    def __init__(self, device: Device, rows: int = 16, width: int = 16) -> None:
        self._device = device
        self._written: list[BlockTable] = []
        self._versions: list[int] = []
        """Of each row: its table, and the table's version."""
        self.num_sent = 0
        """Rows sent so far."""
        self._allocate(rows, width)

    def _allocate(self, rows: int, width: int) -> None:
        self.host = np.zeros((rows, width), np.int32)
        # A processor reads the host's own memory, and nothing has to be sent.
        self.on_device = self._device.upload(self.host.copy() if self._device.is_asynchronous else self.host)[0]

    def update(self, tables: list[BlockTable]) -> None:
        """Make row i that of `tables[i]`."""
        changed = self._changed(tables)
        width = max((len(tables[row].block_ids) for row in changed), default=1)
        if len(tables) > len(self.host) or width > self.host.shape[1]:
            self._grow(len(tables), width)
            changed = list(range(len(tables)))
            width = self.host.shape[1]
        for row in changed:
            block_ids = tables[row].block_ids
            self.host[row, : len(block_ids)] = block_ids
        self.num_sent += len(changed)
        if changed and self._device.is_asynchronous:
            rows, values = self._device.upload(np.array(changed, np.int64), self.host[changed, :width])
            self.on_device[:, :width].index_copy_(0, rows, values)

    def _changed(self, tables: list[BlockTable]) -> list[int]:
        written, versions = self._written, self._versions
        changed = []
        for row, table in enumerate(tables):
            if row == len(written):
                written.append(table)
                versions.append(table.version)
            elif written[row] is table and versions[row] == table.version:
                continue
            else:
                written[row], versions[row] = table, table.version
            changed.append(row)
        return changed

    def _grow(self, rows: int, width: int) -> None:
        wanted = (1 << (rows - 1).bit_length(), 1 << (width - 1).bit_length())
        del self._written[rows:], self._versions[rows:]
        self._allocate(*(max(sizes) for sizes in zip(self.host.shape, wanted, strict=True)))


def tables_of(batch: Batch) -> list[BlockTable]:
    """The block table of each chunk."""
    return [sequence.table for sequence in batch.sequences if sequence.table is not None]


def host_inputs(batch: Batch, tables: BlockTables, block_size: int) -> HostInputs:
    """The arrays of a batch; brings `tables` up to date."""
    num_chunks = len(batch.sequences)
    tables.update(tables_of(batch))
    starts_S = np.array(batch.starts, np.int64)
    counts_S = np.array(batch.counts, np.int64)
    query_starts_S1 = np.zeros(num_chunks + 1, np.int64)
    np.cumsum(counts_S, out=query_starts_S1[1:])
    chunk_T = np.repeat(np.arange(num_chunks), counts_S)
    positions_T = np.arange(batch.num_tokens) - np.repeat(query_starts_S1[:-1] - starts_S, counts_S)
    blocks_T = tables.host[chunk_T, positions_T // block_size].astype(np.int64)
    token_ids, fed = token_ids_of(batch)
    fed_F2 = np.array(fed, np.int64).reshape(-1, 2)
    return HostInputs(
        input_ids_T=np.array(token_ids, np.int64),
        positions_T=positions_T,
        wanted_R=np.array(batch.logits_layout().tokens, np.int64),
        slots_T=blocks_T * block_size + positions_T % block_size,
        query_starts_S1=query_starts_S1.astype(np.int32),
        context_lens_S=(starts_S + counts_S).astype(np.int32),
        fed_tokens_F=fed_F2[:, 0],
        fed_draws_F=fed_F2[:, 1],
    )


def token_ids_of(batch: Batch) -> tuple[array[int], list[tuple[int, int]]]:
    """The ids (int32) of all tokens, 0 for unseen ones, and (token, draw) of each of these."""
    flat = array("i")
    fed: list[tuple[int, int]] = []
    for sequence, start, num_tokens in zip(batch.sequences, batch.starts, batch.counts, strict=True):
        token_ids = sequence.token_ids
        if num_tokens > 1:
            flat.extend(token_ids[start : start + num_tokens])
        elif start < len(token_ids):
            flat.append(token_ids[start])
        else:
            fed.append((len(flat), sequence.draw))
            flat.append(0)
    return flat, fed
