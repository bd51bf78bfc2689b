"""Offline batch inference for language models: prompts in, Parquet out, every row back."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchgen.engine.engine import Engine
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


def __getattr__(name: str) -> Any:
    # The one place of lazy loading: `batchgen --help` must not pay for torch.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'batchgen' has no attribute {name!r}")
