"""Paged attention behind transformers' AttentionInterface.

Shapes: T tokens of the step (all sequences flattened), H query heads, G key/value heads, D head size, S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from batchgen_kernels.attention_plan import TileShape
from transformers import AttentionInterface

from batchgen.engine.ops import Ops
from batchgen.engine.step_inputs import StepInputs

ATTENTION_NAME = "batchgen"


@dataclass(slots=True)
class LayerAttention:
    """The state of one attention layer, attached to its module as `batchgen_attention`.

    Attached rather than passed: some models drop keyword arguments on the way to their attention.
    """

    ops: Ops
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    window: int | None
    step: StepInputs | None = None
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None
    """Of an int8 cache."""
    tiles: TileShape | None = None
    """Which of the step's plans is this layer's, where its kernel takes one."""
    num_calls: int = 0
    """Counted by the self-check: each layer must come here exactly once per forward pass."""

    def __call__(
        self,
        q_THD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
        *,
        scale: float,
        softcap: float | None,
        sinks_H: torch.Tensor | None,
    ) -> torch.Tensor:
        """Write the step's K and V, then attend over the cache, also for the tokens just written."""
        step = self.step
        assert step is not None, "attention runs only inside ModelRunner.execute"
        self.num_calls += 1
        planned = {"plan": step.plans[self.tiles]} if self.tiles is not None else {}
        self.ops.store_kv(k_TGD, v_TGD, self.k_cache, self.v_cache, step.slots_T, self.k_scales, self.v_scales)
        return self.ops.paged_attention(
            q_THD,
            self.k_cache,
            self.v_cache,
            step.block_tables_SB,
            step.query_starts_S1,
            step.context_lens_S,
            scale=scale,
            window=self.window,
            softcap=softcap,
            sinks_H=sinks_H,
            k_scales=self.k_scales,
            v_scales=self.v_scales,
            **planned,
        )


def _attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: q [1, H, T, D], k and v [1, G, T, D], RoPE applied; returns [1, T, H, Dv]."""
    layer: LayerAttention = module.batchgen_attention  # type: ignore[assignment]
    q_THD, k_TGD, v_TGD = (states[0].transpose(0, 1) for states in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out_THD = layer(q_THD, k_TGD, v_TGD, scale=scale, softcap=softcap, sinks_H=s_aux)
    return out_THD.unsqueeze(0), None


# A name that the mask registry does not know makes masks None: causality, windows and chunks are ours.
AttentionInterface.register(ATTENTION_NAME, _attention_forward)
