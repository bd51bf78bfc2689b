"""The probe runs the real model over many batch sizes, and tells when a row knows its neighbours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from batchgen_kernels import cpu

from batchgen.engine.batch import Batch
from batchgen.engine.loading import EngineOptions, load_parts
from batchgen.engine.model_loader import load_model
from batchgen.engine.model_runner import ModelRunner
from batchgen.engine.row_probe import row_dependence

pytestmark = pytest.mark.usefixtures("own_cache")


def _flags() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.read_text() if cpuinfo.exists() else ""


class Leaky(ModelRunner):
    """A runner whose last bits depend on the number of rows, as an unlucky matrix product's do."""

    def __init__(self, inner: ModelRunner) -> None:
        self.inner = inner
        self.cache = inner.cache

    def execute(self, batch: Batch) -> torch.Tensor:
        logits_RV = self.inner.execute(batch)
        return torch.nextafter(logits_RV, logits_RV + 1) if len(logits_RV) == 24 else logits_RV


@pytest.mark.skipif(not cpu.is_available(), reason="the promise is the C++ kernels'")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_row_knows_its_neighbours(tiny_llama: Path, dtype: str) -> None:
    assert load_parts(EngineOptions(str(tiny_llama), dtype=dtype, device="cpu")).notes == ()


@pytest.mark.skipif("avx512_bf16" not in _flags(), reason="a promise on processors with avx512_bf16")
def test_the_quickstart_model_keeps_its_promise_in_bf16(smollm2: Path) -> None:
    assert load_parts(EngineOptions(str(smollm2), dtype="bfloat16", device="cpu", kv_cache_memory="64MiB")).notes == ()


def test_a_row_that_knows_its_neighbours_is_told(tiny_llama: Path) -> None:
    parts = load_parts(EngineOptions(str(tiny_llama), dtype="float32", device="cpu", kv_cache_memory="1MiB"))
    assert isinstance(parts.runner, ModelRunner)
    # Another key than that of the sound runner, whose verdict is remembered.
    loaded = load_model(tiny_llama, "float32", "cpu", max_model_len=64)
    loaded.config.probe = "leaky"
    assert "24 rows on 1 threads" in row_dependence(Leaky(parts.runner), loaded)
