"""Offline batch inference for language models: prompts in, Parquet out, every row back."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from batchgen.collection import collection_paused, exempt_from_collection

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

_ENGINE_PARTS = ("torch", "transformers", "batchgen.engine.engine")
"""What takes the time when the engine is imported."""


def import_engine() -> Iterator[None]:
    """Not for users. Import what an engine needs, a part at a time: one may look up between, or leave the rest.

    What a part brings is exempt from collection.
    """
    for part in _ENGINE_PARTS:
        with collection_paused():
            import_module(part)
            exempt_from_collection()
        yield


def __getattr__(name: str) -> Any:
    # The one place of lazy loading: `batchgen --help` must not pay for torch, nor a run with one engine for dask.
    home = _HOMES.get(name) or _INTERNAL_HOMES.get(name)
    if home is not None:
        with collection_paused():
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'batchgen' has no attribute {name!r}")
