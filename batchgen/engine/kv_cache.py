"""The tensors behind the block pool: K and V of every layer, block by block.

Shapes: B blocks, G key/value heads, S slots of a block, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from batchgen_kernels import cpu


class LayerShape(NamedTuple):
    """What one attention layer stores per token."""

    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int


class KVCache:
    """One pair of tensors k [B, G, S, Dk], v [B, G, S, Dv] per attention layer; every layer uses the same block ids.

    With `dtype` int8 each token and head has a scale: fp32 tensors [B, G, S] beside keys and values.
    """

    def __init__(
        self, layers: list[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.keys = [self._tensor(shape.num_kv_heads, shape.head_dim_k, dtype, device) for shape in layers]
        self.values = [self._tensor(shape.num_kv_heads, shape.head_dim_v, dtype, device) for shape in layers]
        self.key_scales: list[torch.Tensor | None] = [None] * len(layers)
        self.value_scales: list[torch.Tensor | None] = [None] * len(layers)
        if dtype == torch.int8:
            for scales in (self.key_scales, self.value_scales):
                scales[:] = [self._tensor(shape.num_kv_heads, None, torch.float32, device) for shape in layers]

    def _tensor(self, num_heads: int, dim: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        shape = (self.num_blocks, num_heads, self.block_size, *(() if dim is None else (dim,)))
        if device.type == "cpu" and cpu.is_available():
            return cpu.empty_in_huge_pages(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=device)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of it, for whoever copies blocks."""
        scales = [scale for scale in (*self.key_scales, *self.value_scales) if scale is not None]
        return [*self.keys, *self.values, *scales]

    @property
    def num_bytes(self) -> int:
        """Memory of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @staticmethod
    def bytes_per_block(layers: list[LayerShape], block_size: int, dtype: torch.dtype) -> int:
        """Bytes that one block takes over all layers."""
        scales = 2 * torch.float32.itemsize if dtype == torch.int8 else 0
        per_token = sum(
            shape.num_kv_heads * ((shape.head_dim_k + shape.head_dim_v) * dtype.itemsize + scales) for shape in layers
        )
        return per_token * block_size
