"""The tensors behind the block pool: K and V of every layer, block by block.

Shapes: B blocks, G key/value heads, S slots of a block, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class LayerShape(NamedTuple):
    """What one attention layer stores per token."""

    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int


class KVCache:
    """One pair of tensors k [B, G, S, Dk], v [B, G, S, Dv] per attention layer; every layer uses the same block ids."""

    def __init__(
        self, layers: list[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.keys = [
            torch.empty(num_blocks, shape.num_kv_heads, block_size, shape.head_dim_k, dtype=dtype, device=device)
            for shape in layers
        ]
        self.values = [
            torch.empty(num_blocks, shape.num_kv_heads, block_size, shape.head_dim_v, dtype=dtype, device=device)
            for shape in layers
        ]

    @property
    def num_bytes(self) -> int:
        """Memory of all its tensors."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    @staticmethod
    def bytes_per_block(layers: list[LayerShape], block_size: int, dtype: torch.dtype) -> int:
        """Bytes that one block takes over all layers."""
        per_token = sum(shape.num_kv_heads * (shape.head_dim_k + shape.head_dim_v) for shape in layers)
        return per_token * block_size * dtype.itemsize
