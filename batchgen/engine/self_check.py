"""Before a model runs: does it compute the same over paged, flattened tokens as by itself?"""

from __future__ import annotations

from transformers import PretrainedConfig


def check_architecture(config: PretrainedConfig) -> None:
    """Raise ModelError, by name and reason, if models of this config would run wrong."""
