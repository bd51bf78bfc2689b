"""Architectures that are refused by name, each with the reason why it would run wrong."""

from __future__ import annotations

from transformers import PretrainedConfig


def refusal(config: PretrainedConfig) -> str | None:
    """Why models of this type are refused; None if the name alone says nothing against it."""
    return None
