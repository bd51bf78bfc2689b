"""Offline batch inference for language models: prompts in, Parquet out, every row back."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchgen.engine.engine import Engine
    from batchgen.pipeline.cluster.generation import ManyWorkers as ManyWorkers
    from batchgen.records import Completion, PartialSample, Prompt, RowError, Sample
    from batchgen.sampling_params import BeamParams, SamplingParams

__all__ = [
    "BeamParams",
    "Completion",
    "Engine",
    "PartialSample",
    "Prompt",
    "RowError",
    "Sample",
    "SamplingParams",
    "__version__",
]
__version__ = "0.1.0"

_HOMES = {
    "BeamParams": "batchgen.sampling_params",
    "Completion": "batchgen.records",
    "Engine": "batchgen.engine.engine",
    "PartialSample": "batchgen.records",
    "Prompt": "batchgen.records",
    "RowError": "batchgen.records",
    "Sample": "batchgen.records",
    "SamplingParams": "batchgen.sampling_params",
}

_INTERNAL_HOMES = {"ManyWorkers": "batchgen.pipeline.cluster.generation"}
"""Not for users: what a run loads only when it needs it."""


def __getattr__(name: str) -> Any:
    # The one place of lazy loading: `batchgen --help` must not pay for torch, nor a run with one engine for dask.
    home = _HOMES.get(name) or _INTERNAL_HOMES.get(name)
    if home is not None:
        return getattr(import_module(home), name)
    raise AttributeError(f"module 'batchgen' has no attribute {name!r}")
