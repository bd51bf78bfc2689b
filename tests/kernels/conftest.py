"""What tests of kernels set for the whole process: threads, and the level of instruction sets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from batchgen_kernels import cpu


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """One thread unless the test sets more; afterwards as many as before, and the highest level.

    Waiting for a second thread on a busy machine would take most of the time of these small calls.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    if cpu.is_available():
        cpu.set_level(cpu.levels()[-1])
