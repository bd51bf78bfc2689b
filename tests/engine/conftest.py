"""Fixtures that several files of tests use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.models import save_model


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer llama in float32, with a tokenizer."""
    return save_model(tmp_path_factory.mktemp("models"), "plain")


@pytest.fixture
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for what is remembered between runs, instead of the user's; the directory is made in use."""
    home = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home / "batchgen"
