"""Memory that is made ready before it is written."""

from __future__ import annotations

import mmap
import resource
import sys

import pytest
import torch

from batchgen.engine.memory import TouchAhead

MIB = 1 << 20


def fresh(num_bytes: int) -> torch.Tensor:
    """Memory that nobody has written: an allocator may give back what somebody has."""
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


def faults_of_writing(tensor: torch.Tensor) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensor.fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="madvise of Linux")
def test_touched_memory_is_there_when_it_is_written_and_keeps_its_contents() -> None:
    written = torch.arange(MIB, dtype=torch.int32)
    tensors = [fresh(8 * MIB) for _ in range(4)]
    untouched = faults_of_writing(fresh(8 * MIB))
    TouchAhead([written, *tensors], 36 * MIB).finish().join()
    assert torch.equal(written, torch.arange(MIB, dtype=torch.int32))
    assert sum(map(faults_of_writing, tensors)) < untouched / 2


def test_no_more_is_touched_than_asked_for() -> None:
    tensor = fresh(16 * MIB)
    TouchAhead([tensor], 4 * MIB).finish().join()
    assert faults_of_writing(tensor[8 * MIB :]) > 0
    TouchAhead([], MIB).finish().join()
