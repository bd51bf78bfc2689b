"""Set up before any test module is imported."""

from __future__ import annotations

import os

# Triton reads it when it is first imported, and the engine's tests import the kernels before the kernels' tests do.
os.environ.setdefault("TRITON_INTERPRET", "1")
