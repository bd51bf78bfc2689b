"""Runs one batch through the model: block copies, a flattened forward pass, the logits of the rows that are sampled.

Shapes: T tokens of the step, S chunks (one per scheduled sequence), B blocks of the longest block table, R sampled
rows, V vocabulary.
"""

from __future__ import annotations

from array import array

import numpy as np
import torch

from batchgen.engine.attention import LayerAttention, StepInputs
from batchgen.engine.batch import Batch
from batchgen.engine.kv_cache import KVCache
from batchgen.engine.model_loader import LoadedModel
from batchgen.engine.ops import Ops


class ModelRunner:
    """Executes batches on one device.

    All tokens of a step form one row of length T; which sequence a token belongs to is known to attention alone.
    """

    def __init__(self, loaded: LoadedModel, cache: KVCache, ops: Ops) -> None:
        self.model = loaded.model
        self.device = loaded.device
        self.cache = cache
        self.ops = ops
        self._copied = cache.tensors
        self.layers = [
            LayerAttention(
                ops,
                cache.keys[index],
                cache.values[index],
                spec.window,
                k_scales=cache.key_scales[index],
                v_scales=cache.value_scales[index],
            )
            for index, spec in enumerate(loaded.layers)
        ]
        for layer, module in zip(self.layers, loaded.attention_modules, strict=True):
            module.batchgen_attention = layer  # type: ignore[assignment]

    @torch.inference_mode()
    def execute(self, batch: Batch) -> torch.Tensor:
        """Compute the batch; returns logits [R, V] in the model's dtype, the rows of `batch.logits_layout()`."""
        if batch.copies:
            self.ops.copy_blocks(self._copied, torch.tensor(batch.copies, dtype=torch.int64, device=self.device))
        input_ids_T, positions_T, step = self._inputs(batch)
        wanted_R = torch.tensor(batch.logits_layout().tokens, dtype=torch.int64, device=self.device)
        for layer in self.layers:
            layer.step = step
        logits_1RV: torch.Tensor = self.model(
            input_ids=input_ids_T.unsqueeze(0),
            position_ids=positions_T.unsqueeze(0),
            use_cache=False,
            logits_to_keep=wanted_R,
        ).logits
        return logits_1RV[0]

    def _inputs(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, StepInputs]:
        block_size = self.cache.block_size
        chunks = batch.chunks
        starts_S = np.fromiter((chunk.start for chunk in chunks), np.int64, len(chunks))
        counts_S = np.fromiter((chunk.num_tokens for chunk in chunks), np.int64, len(chunks))
        query_starts_S1 = np.zeros(len(chunks) + 1, np.int64)
        np.cumsum(counts_S, out=query_starts_S1[1:])
        chunk_T = np.repeat(np.arange(len(chunks)), counts_S)
        positions_T = np.arange(batch.num_tokens) - np.repeat(query_starts_S1[:-1] - starts_S, counts_S)
        tables_SB = _block_tables(batch)
        slots_T = tables_SB[chunk_T, positions_T // block_size].astype(np.int64) * block_size + positions_T % block_size
        step = StepInputs(
            slots_T=self._to_device(slots_T),
            block_tables_SB=self._to_device(tables_SB),
            query_starts_S1=self._to_device(query_starts_S1.astype(np.int32)),
            context_lens_S=self._to_device((starts_S + counts_S).astype(np.int32)),
        )
        return self._to_device(_token_ids(batch)), self._to_device(positions_T), step

    def _to_device(self, values: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)


def _block_tables(batch: Batch) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    tables = [chunk.sequence.table.block_ids for chunk in batch.chunks if chunk.sequence.table is not None]
    tables_SB = np.zeros((len(tables), max(len(table) for table in tables)), np.int32)
    for row, table in enumerate(tables):
        tables_SB[row, : len(table)] = table
    return tables_SB


def _token_ids(batch: Batch) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    flat = array("i")
    for sequence, start, num_tokens in batch.chunks:
        if num_tokens == 1:
            flat.append(sequence.token_ids[start])
        else:
            flat.extend(sequence.token_ids[start : start + num_tokens])
    return np.frombuffer(flat, np.int32).astype(np.int64)
