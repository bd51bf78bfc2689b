"""Runs one batch through the model: block copies, a flattened forward pass, the logits of the rows that are sampled.

Shapes: T tokens of the step, S chunks (one per scheduled sequence), R sampled rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from batchgen_kernels import cpu
from batchgen_kernels.attention_plan import tile_shape

from batchgen.engine.attention import LayerAttention
from batchgen.engine.attention_work import make_plans
from batchgen.engine.batch import Batch
from batchgen.engine.decode_steps import DecodeSteps
from batchgen.engine.device import PROCESSOR, Device
from batchgen.engine.fused_decoder import FusedCausalLM
from batchgen.engine.kv_cache import KVCache
from batchgen.engine.model_loader import LoadedModel
from batchgen.engine.ops import Ops
from batchgen.engine.step_inputs import (
    BlockTables,
    HostInputs,
    StepInputs,
    StepTokens,
    host_inputs,
    tables_of,
    token_ids_of,
)


class ModelRunner:
    """Executes batches on one device.

    All tokens of a step form one row of length T; which sequence a token belongs to is known to attention alone.
    Nothing here waits for the device.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        cache: KVCache,
        ops: Ops,
        device: Device = PROCESSOR,
        fused: FusedCausalLM | None = None,
    ) -> None:
        self.model = loaded.model
        self._fused = fused
        self.device = device
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
        if ops.takes_plan:
            for layer, spec in zip(self.layers, loaded.layers, strict=True):
                layer.tiles = tile_shape(spec.num_heads, spec.num_kv_heads, max(spec.head_dim_k, spec.head_dim_v))
        self._tiles = {layer.tiles for layer in self.layers if layer.tiles is not None}
        for layer, module in zip(self.layers, loaded.attention_modules, strict=True):
            module.batchgen_attention = layer  # type: ignore[assignment]
        widest = -(-loaded.max_model_len // cache.block_size)
        # A recorded step holds on to the tables: they must never have to grow.
        room = (max(device.decode_buckets), widest) if device.decode_buckets else ()
        self.tables = BlockTables(device, *room)
        self.decodes = DecodeSteps(device, self.tables, self._forward)

    def execute(self, batch: Batch, drawn_R: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the batch; returns logits [R, V], the rows of `batch.logits_layout()`, valid until the next step.

        `drawn_R` (int64, on the device): what the step before drew, where the host does not know it yet.
        """
        if batch.copies:
            self.ops.copy_blocks(self._copied, *self.device.upload(np.array(batch.copies, np.int64)))
        return self._run_modules(batch, drawn_R) if self._fused is None else self._run_fused(self._fused, batch)

    def _run_fused(self, model: FusedCausalLM, batch: Batch) -> torch.Tensor:
        token_ids, unseen = token_ids_of(batch)
        assert not unseen, "a processor has run the step before"
        self.tables.update(tables_of(batch))
        chunks = cpu.TokenChunks(token_ids, batch.starts, batch.counts, batch.logits_layout().tokens)
        return model(chunks, self.tables.on_device)

    @torch.inference_mode()
    def _run_modules(self, batch: Batch, drawn_R: torch.Tensor | None) -> torch.Tensor:
        inputs = host_inputs(batch, self.tables, self.cache.block_size)
        size = self.decodes.size_for(inputs)
        logits_RV = None if size is None else self._run_recorded(inputs, size, drawn_R)
        return self._run(inputs, drawn_R) if logits_RV is None else logits_RV

    def _run_recorded(self, inputs: HostInputs, size: int, drawn_R: torch.Tensor | None) -> torch.Tensor | None:
        padded = inputs.padded(size)
        plans = make_plans(self._tiles, padded, self.tables.host[:size], self.cache.block_size, self.device)
        logits_RV = self.decodes.run(padded, plans, lambda ids_T: self._feed(ids_T, inputs, drawn_R))
        return None if logits_RV is None else logits_RV[: len(inputs.wanted_R)]

    def _run(self, inputs: HostInputs, drawn_R: torch.Tensor | None) -> torch.Tensor:
        num_sequences, longest = len(inputs.context_lens_S), int(inputs.context_lens_S.max())
        arrays = (inputs.input_ids_T, inputs.positions_T, inputs.wanted_R, inputs.slots_T)
        sent = self.device.upload(*arrays, inputs.query_starts_S1, inputs.context_lens_S)
        slots_T, query_starts_S1, context_lens_S = sent[3:]
        num_blocks = -(-longest // self.cache.block_size)
        tables_SB = self.tables.on_device[:num_sequences, :num_blocks].contiguous()
        step = StepInputs(slots_T, tables_SB, query_starts_S1, context_lens_S)
        step.plans = make_plans(
            self._tiles, inputs, self.tables.host[:num_sequences], self.cache.block_size, self.device
        )
        self._feed(sent[0], inputs, drawn_R)
        return self._forward(StepTokens(*sent[:3]), step)

    def _feed(self, input_ids_T: torch.Tensor, inputs: HostInputs, drawn_R: torch.Tensor | None) -> None:
        """Put the tokens that only the device knows where they are read."""
        if len(inputs.fed_tokens_F):
            assert drawn_R is not None, "an unseen token without the draws of its step"
            tokens_F, draws_F = self.device.upload(inputs.fed_tokens_F, inputs.fed_draws_F)
            input_ids_T.index_copy_(0, tokens_F, drawn_R.index_select(0, draws_F))

    def _forward(self, tokens: StepTokens, step: StepInputs) -> torch.Tensor:
        for layer in self.layers:
            layer.step = step
        logits_1RV: torch.Tensor = self.model(
            input_ids=tokens.input_ids_T.unsqueeze(0),
            position_ids=tokens.positions_T.unsqueeze(0),
            use_cache=False,
            logits_to_keep=tokens.wanted_R,
        ).logits
        return logits_1RV[0]
