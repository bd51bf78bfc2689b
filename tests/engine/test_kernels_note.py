"""Where the C++ kernels cannot be used, a model still runs, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from batchgen_kernels import cpu
from batchgen_kernels.cpu import library

from batchgen.engine.loading import EngineOptions, load_parts
from batchgen.errors import JobError


@pytest.fixture
def stale_library(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = cpu.KernelsUnavailable("_native.so has interface 8, not 9; build it again")
    monkeypatch.setattr(library, "_open", lambda: opened)


@pytest.mark.usefixtures("stale_library")
def test_a_library_of_other_sources_is_named_in_the_notes(tiny_llama: Path) -> None:
    parts = load_parts(EngineOptions(str(tiny_llama), dtype="float32", device="cpu", kv_cache_memory="1MiB"))
    (note,) = (note for note in parts.notes if note.startswith("slow: "))
    assert note == (
        "slow: _native.so has interface 8, not 9; build it again. Until then attention and sampling run through "
        "torch, many times slower"
    )


@pytest.mark.usefixtures("stale_library")
def test_int8_says_why_it_cannot_run(tiny_llama: Path) -> None:
    options = EngineOptions(str(tiny_llama), dtype="bfloat16", device="cpu", quantization="int8")
    with pytest.raises(JobError, match=r"int8 needs the C\+\+ kernels: _native\.so has interface 8"):
        load_parts(options)


def test_kernels_that_are_there_say_nothing() -> None:
    assert bool(cpu.why_unavailable()) != cpu.is_available()
