"""Calls of paged_attention over poisoned caches, and attention written down as plainly as can be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from batchgen_kernels.segments import SharedPrefixes
from batchgen_kernels.store_kv import QUANTIZED_MAX, store_kv_reference
from torch import Tensor


@dataclass
class AttentionCase:
    """A batch of sequences with given contexts and numbers of queries, stored at shuffled blocks.

    `shared` gives, for some groups of sequences, how many first tokens they have in common blocks.
    """

    contexts: list[int]
    queries: list[int]
    heads: tuple[int, int] = (6, 2)
    dims: tuple[int, int] = (16, 16)
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    shared: dict[tuple[int, ...], int] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)
        num_kv, (k_dim, v_dim), cache_dtype = self.heads[1], self.dims, self.cache_dtype or self.dtype
        self.tables = self._tables(random)
        num_blocks = sum(-(-length // self.block_size) for length in self.contexts) + 2
        shape = (num_blocks, num_kv, self.block_size)
        poison = torch.nan if cache_dtype.is_floating_point else -128
        self.k_cache = torch.full((*shape, k_dim), 0.0).to(cache_dtype).fill_(poison)
        self.v_cache = torch.full((*shape, v_dim), 0.0).to(cache_dtype).fill_(poison)
        quantized = cache_dtype in QUANTIZED_MAX
        self.scales = {x: torch.full(shape, torch.nan) for x in ("k_scales", "v_scales")} if quantized else {}
        self.keys, self.values = self._store(random)
        self.q = torch.randn(sum(self.queries), self.heads[0], k_dim, generator=random).to(self.dtype)
        self.starts = torch.tensor([0, *self.queries]).cumsum(0).int()
        self.sinks_H = torch.randn(self.heads[0], generator=random) if self.sinks else None

    def _tables(self, random: torch.Generator) -> Tensor:
        """Blocks in random order; entries past a context are wild."""
        counts = [-(-length // self.block_size) for length in self.contexts]
        tables = torch.full((len(counts), max(counts) + 2), 2**30, dtype=torch.int32)
        order, used = torch.randperm(sum(counts) + 1, generator=random).int(), 0
        for sequence, count in enumerate(counts):
            tables[sequence, :count] = order[used : used + count]
            used += count
        for members, length in self.shared.items():
            for member in members[1:]:
                tables[member, : length // self.block_size] = tables[members[0], : length // self.block_size]
        return tables

    def _store(self, random: torch.Generator) -> tuple[list[Tensor], list[Tensor]]:
        """Write the contexts; return what the caches hold, [K, length, D] in double precision."""
        shared = {member: (members[0], n) for members, n in self.shared.items() for member in members[1:]}
        raw: list[tuple[Tensor, Tensor]] = []
        for sequence, length in enumerate(self.contexts):
            k, v = (torch.randn(length, self.heads[1], dim, generator=random).to(self.dtype) for dim in self.dims)
            if sequence in shared:
                leader, n = shared[sequence]
                k[:n], v[:n] = raw[leader][0][:n], raw[leader][1][:n]
            raw.append((k, v))
            position = torch.arange(length)
            slots = self.tables[sequence].long()[position // self.block_size] * self.block_size
            store_kv_reference(
                k, v, self.k_cache, self.v_cache, slots + position % self.block_size, *self.scales.values()
            )
        return self._read(self.k_cache, "k_scales"), self._read(self.v_cache, "v_scales")

    def _read(self, cache: Tensor, scales: str) -> list[Tensor]:
        values = cache.double() * self.scales[scales].double().unsqueeze(-1) if self.scales else cache.double()
        chosen = [self.tables[s, : -(-n // self.block_size)].long() for s, n in enumerate(self.contexts)]
        flat = [values[blocks].transpose(0, 1).flatten(1, 2) for blocks in chosen]
        return [x[:, :n] for x, n in zip(flat, self.contexts, strict=True)]

    @property
    def prefixes(self) -> SharedPrefixes:
        """The shared prefixes as the kernels take them."""
        members = list(self.shared)
        starts = torch.tensor([0, *(len(group) for group in members)]).cumsum(0).int()
        flat = torch.tensor([member for group in members for member in group]).int()
        return SharedPrefixes(starts, flat, torch.tensor(list(self.shared.values())).int())

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        return float(self.dims[0] ** -0.5)

    def arguments(self) -> tuple[Tensor, ...]:
        """The positional arguments."""
        contexts = torch.tensor(self.contexts).int()
        return self.q, self.k_cache, self.v_cache, self.tables, self.starts, contexts

    def options(self) -> dict[str, Any]:
        """The keyword arguments."""
        settings = {"scale": self.scale, "window": self.window, "softcap": self.softcap, "sinks_H": self.sinks_H}
        return settings | self.scales

    def alone(self, sequence: int, queries: range) -> tuple[tuple[Tensor, ...], slice]:
        """The arguments for some queries of one sequence, as a chunk of their own, and their rows in the whole call."""
        before = self.contexts[sequence] - self.queries[sequence]
        rows = slice(int(self.starts[sequence]) + queries.start, int(self.starts[sequence]) + queries.stop)
        starts, contexts = torch.tensor([0, len(queries)]).int(), torch.tensor([before + queries.stop]).int()
        arguments = self.q[rows], self.k_cache, self.v_cache, self.tables[sequence : sequence + 1], starts, contexts
        return arguments, rows

    def expected(self) -> Tensor:
        """Softmax attention of each sequence by itself, in double precision -> fp64 [T, H, Dv]."""
        outs = []
        group = self.heads[0] // self.heads[1]
        for sequence, (length, count) in enumerate(zip(self.contexts, self.queries, strict=True)):
            k, v = (x[sequence].repeat_interleave(group, 0) for x in (self.keys, self.values))
            q = self.q[self.starts[sequence] : self.starts[sequence + 1]].double().transpose(0, 1)
            scores = q @ k.transpose(1, 2) * self.scale
            if self.softcap is not None:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            position, key = torch.arange(length - count, length)[:, None], torch.arange(length)
            hidden = key > position
            if self.window is not None:
                hidden |= key <= position - self.window
            scores = scores.masked_fill(hidden, -torch.inf)
            if self.sinks_H is not None:
                sinks = self.sinks_H.double()[:, None, None].expand(-1, count, 1)
                weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
            else:
                weights = scores.softmax(-1)
            outs.append((weights @ v).transpose(0, 1))
        return torch.cat(outs)
