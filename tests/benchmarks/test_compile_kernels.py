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
