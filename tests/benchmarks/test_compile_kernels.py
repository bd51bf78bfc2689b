"""The ahead-of-time compilation, in processes of its own: here kernels are interpreted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_a_kernel_compiles_for_every_target_without_a_gpu() -> None:
    done = run("-m", "benchmarks.compile_kernels", "--only", "silu_mul", "--workers", "1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["kernel", "target", "shape", "registers", "spills", "shared"]
    assert {line.split()[1] for line in lines[1:-1]} == {"sm_80", "sm_90", "gfx942"}
    assert lines[-1] == f"{len(lines) - 2} compiled, 0 with a problem"


@pytest.mark.slow
def test_too_much_shared_memory_broken_code_and_an_empty_table_are_problems() -> None:
    done = run(
        "-c",
        "from benchmarks.compile_kernels import TARGETS, _cases, compile_launch, main\n"
        "case = _cases('rms_norm')[0]\n"
        "print(compile_launch(case.launch, TARGETS[1]._replace(shared_limit=0), case.shape).problem)\n"
        "broken = case.launch._replace(constants=case.launch.constants | {'BLOCK_E': 3})\n"
        "print(compile_launch(broken, TARGETS[1], case.shape).problem[:16])\n"
        "print(main(['--only', 'no such kernel']))\n",
    )
    assert done.returncode == 0, done.stderr
    needs, broken, *table, code = done.stdout.splitlines()
    assert needs.startswith("needs ")
    assert needs.endswith("bytes of shared memory of 0")
    assert broken == "does not compile"
    assert (table[-1], code) == ("0 compiled, 0 with a problem", "1")


BIND_AS_THE_RUNTIME_DOES = """
import torch, triton
from triton.backends.compiler import GPUTarget
from benchmarks.compile_kernels import _cases
class Driver:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
class Argument:
    def __init__(self, tensor): self.dtype = tensor.dtype
    def data_ptr(self): return 4096
triton.runtime.driver.set_active(Driver())
for name in ("decode", "merge", "group"):
    launch = _cases(name)[0].launch
    arguments = {k: Argument(v) if isinstance(v, torch.Tensor) else v for k, v in launch.arguments.items()}
    launch.kernel.warmup(**arguments, **launch.constants, grid=launch.grid, num_warps=launch.num_warps)
    print(name)
"""


@pytest.mark.slow
def test_the_runtime_takes_the_arguments_of_a_launch() -> None:
    done = run("-W", "ignore", "-c", BIND_AS_THE_RUNTIME_DOES)
    assert done.stdout.split() == ["decode", "merge", "group"], done.stderr
