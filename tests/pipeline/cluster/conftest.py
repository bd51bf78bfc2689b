"""What every test with worker processes stands on."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from tests.pipeline.cluster.running import children, num_open_files


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Worker processes find the fakes, and the test leaves no process and no file open."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    before = children().keys()
    files = num_open_files(os.getpid())
    yield
    assert children().keys() <= before
    # Of the event loop that dask's client keeps for the next one.
    assert num_open_files(os.getpid()) <= files + 8
