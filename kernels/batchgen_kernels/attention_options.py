"""What paged_attention can be asked for beside its tensors; one description for the op and all who compute it."""

from __future__ import annotations

from typing import Required, TypedDict

from torch import Tensor

from batchgen_kernels.attention_plan import AttentionPlan
from batchgen_kernels.segments import SharedPrefixes


class AttentionOptions(TypedDict, total=False):
    """Keyword arguments; what is absent is None."""

    scale: Required[float]
    """Of the scores."""
    window: int | None
    """Keys that a query sees, itself among them; None: all."""
    softcap: float | None
    """None: none."""
    sinks_H: Tensor | None
    """A logit per head that joins the denominator alone."""
    k_scales: Tensor | None
    """fp32 [N, K, B], for quantized caches."""
    v_scales: Tensor | None
    prefixes: SharedPrefixes | None
    """Groups of sequences over the same first blocks; a hint that saves reading."""
    plan: AttentionPlan | None
    """The items of the Triton kernels; a loop over layers passes one, since making it waits for the device. None: made
    for the call."""
    out: Tensor | None
    """Where the result is written; None: into a new tensor."""
