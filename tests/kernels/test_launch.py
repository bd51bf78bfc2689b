"""How kernels are declared and launched, with and without Triton."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch
from batchgen_kernels.launch import Launch, next_power_of_2, num_processors, runs_on_triton

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from batchgen_kernels import copy_blocks, paged_attention, rms_norm, rotary, sample, silu_mul, store_kv
x = torch.ones(2, 4)
assert torch.equal(rms_norm.rms_norm(x, torch.ones(4), 0.0), x)
keys = torch.zeros(2, 5, dtype=torch.int64)
assert sample.sample(x, sample.SampleParams(all_greedy=True), keys).token_ids_R.tolist() == [0, 0]
k_cache, v_cache = torch.zeros(1, 1, 16, 8), torch.zeros(1, 1, 16, 8)
store_kv.store_kv(torch.ones(1, 1, 8), torch.ones(1, 1, 8), k_cache, v_cache, torch.tensor([0]))
integers = (torch.tensor(value, dtype=torch.int32) for value in ([[0]], [0, 1], [1]))
out = paged_attention.paged_attention(torch.ones(1, 1, 8), k_cache, v_cache, *integers, scale=1.0)
assert torch.equal(out, torch.ones(1, 1, 8))
"""


def test_without_triton_the_references_serve() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_processor_tensors_are_left_to_the_references() -> None:
    assert not runs_on_triton(torch.ones(1))


def test_an_empty_grid_launches_nothing() -> None:
    calls: list[tuple[int, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda **_: calls.append(grid)

    for grid in ((0,), (3, 0), (2, 1)):
        Launch(Kernel(), grid, {}, {}).run()
    assert calls == [(2, 1)]


def test_sizes_are_rounded_up_to_powers_of_two() -> None:
    assert [next_power_of_2(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]


def test_a_processor_counts_as_the_gpu_that_is_planned_for() -> None:
    assert num_processors(torch.device("cpu")) == 132
