"""Does a row's result depend on how many rows, and how many threads, are computed with it?

By construction it does not; this asks the real weights on the real processor, once per model and machine.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from batchgen_kernels import cpu

from batchgen.engine.block_pool import BlockPool
from batchgen.engine.made_up import made_up_batch
from batchgen.engine.model_loader import LoadedModel
from batchgen.engine.model_runner import ModelRunner
from batchgen.engine.verdicts import remembered

CHECK = "row_probe-2"
MAX_ROWS = 33
"""One more than two full tiles of any kernel."""

ROW_COUNTS = (*range(1, 18), 23, 24, 25, 31, 32, MAX_ROWS)


def row_dependence(runner: ModelRunner, loaded: LoadedModel, quantization: str | None = None) -> str:
    """Where the model's logits depend on the batch, as a sentence; empty where they do not. Remembered."""
    cache = runner.cache
    types = [str(loaded.dtype), quantization, str(cache.keys[0].dtype)]
    key = [_machine(), types, loaded.config.to_dict(), torch.get_num_threads(), cache.block_size]
    return remembered(CHECK, key, lambda: _find_dependence(runner, loaded.vocab_size))


def _machine() -> list[Any]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else [platform.processor()]
    kinds = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return [sorted(kinds or lines[:1]), *(_kernels() if cpu.is_available() else ["reference"])]


def _kernels() -> list[Any]:
    return [cpu.features().level, cpu.INTERFACE_VERSION]


def _find_dependence(runner: ModelRunner, vocab_size: int) -> str:
    num_rows = min(MAX_ROWS, runner.cache.num_blocks)
    num_threads = torch.get_num_threads()
    expected = _logits(runner, num_rows, vocab_size)
    try:
        for threads in _thread_counts(num_threads):
            torch.set_num_threads(threads)
            for count in (*(count for count in ROW_COUNTS if count < num_rows), num_rows):
                if not torch.equal(_logits(runner, count, vocab_size), expected[:count]):
                    return (
                        f"on this processor a row's logits change in their last bits with {count} rows on {threads} "
                        "threads: rows are right, but may differ between runs with other batches"
                    )
    finally:
        torch.set_num_threads(num_threads)
    return ""


def _thread_counts(num_threads: int) -> Iterable[int]:
    return sorted({1, 2, 3, num_threads // 2, num_threads} & set(range(1, num_threads + 1)))


def _logits(runner: ModelRunner, count: int, vocab_size: int) -> torch.Tensor:
    """Logits [count, V] of `count` texts of one token each, in blocks 0 .. count - 1."""
    pool = BlockPool(runner.cache.num_blocks, runner.cache.block_size)
    # The next step may write its own where these are.
    return runner.execute(made_up_batch([1] * count, vocab_size, [pool] * count)).clone()
