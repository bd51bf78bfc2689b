"""Compile every Triton kernel ahead of time, with no GPU at hand, and print what each one needs.

A row per kernel, target and shape: registers per thread, bytes spilled per thread, bytes of shared memory per program.
Fails (exit 1) where a kernel does not compile, needs more shared memory than a program may have, or spills on sm_90.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from batchgen_kernels.launch import INTERPRETED, Launch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.kernel_cases import CompiledCase, compiled_cases

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.bool: "i1",
}


class Target(NamedTuple):
    """A kind of GPU."""

    name: str
    gpu: GPUTarget
    shared_limit: int
    """Bytes of shared memory that one program may have."""


TARGETS = (
    Target("sm_80", GPUTarget("cuda", 80, 32), 163 << 10),
    Target("sm_90", GPUTarget("cuda", 90, 32), 227 << 10),
    Target("gfx942", GPUTarget("hip", "gfx942", 64), 64 << 10),
)

ALIGNED = [["tt.divisibility", 16]]


class Row(NamedTuple):
    """One line of the table."""

    kernel: str
    target: str
    shape: str
    registers: int
    spills: int
    """Bytes of stack per thread on NVIDIA, spilled vector registers on AMD."""
    shared: int
    problem: str | None = None


def _source(launch: Launch) -> ASTSource:
    """What Triton would compile when the launch is run with tensors that begin at multiples of 16 bytes."""
    signature: dict[str, str] = {}
    attributes: dict[tuple[int], Any] = {}
    for index, name in enumerate(launch.kernel.arg_names):
        if name in launch.constants:
            signature[name] = "constexpr"
            continue
        value = launch.arguments[name]
        if isinstance(value, torch.Tensor):
            signature[name] = "*" + TYPES[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(index,)] = ALIGNED
    return ASTSource(launch.kernel, signature, launch.constants, attributes)


def _nvidia_usage(cubin: bytes) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"REG:(\d+)", report)[0]), int(re.findall(r"STACK:(\d+)", report)[0])


def _amd_usage(assembly: str) -> tuple[int, int]:
    return (
        int(re.findall(r"\.vgpr_count:\s+(\d+)", assembly)[0]),
        int(re.findall(r"\.vgpr_spill_count:\s+(\d+)", assembly)[0]),
    )


def _has_fp8(launch: Launch) -> bool:
    return any(isinstance(x, torch.Tensor) and x.dtype == torch.float8_e4m3fn for x in launch.arguments.values())


def compile_launch(launch: Launch, target: Target, shape: str) -> Row:
    """Compile one launch; what is wrong with it stands in the row."""
    name = launch.kernel.fn.__name__.strip("_").removesuffix("_kernel")
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": False}
    try:
        binary = triton.compile(_source(launch), target=target.gpu, options=options)
    except (triton.CompilationError, RuntimeError) as error:
        return Row(name, target.name, shape, 0, 0, 0, f"does not compile: {error}")
    if target.gpu.backend == "cuda":
        registers, spills = _nvidia_usage(binary.asm["cubin"])
    else:
        registers, spills = _amd_usage(binary.asm["amdgcn"])
    shared, problem = int(binary.metadata.shared), None
    if shared > target.shared_limit:
        problem = f"needs {shared} bytes of shared memory of {target.shared_limit}"
    elif spills and target.name == "sm_90":
        problem = f"spills {spills} bytes"
    return Row(name, target.name, shape, registers, spills, shared, problem)


def _compile_case(index: int, only: str | None) -> list[Row]:
    case = _cases(only)[index]
    # Converting to fp8 e4m3 needs sm_89; store_kv and paged_attention refuse such caches before it.
    targets = [target for target in TARGETS if not (target.name == "sm_80" and _has_fp8(case.launch))]
    return [compile_launch(case.launch, target, case.shape) for target in targets]


def _cases(only: str | None) -> list[CompiledCase]:
    return [case for case in compiled_cases() if only is None or only in case.launch.kernel.fn.__name__]


def compile_all(only: str | None, workers: int) -> Iterator[Row]:
    """Compile every case (of the kernels whose name holds `only`) for every target."""
    num_cases = len(_cases(only))
    if num_cases:
        with multiprocessing.get_context("spawn").Pool(min(workers, num_cases)) as pool:
            for rows in pool.imap(partial(_compile_case, only=only), range(num_cases)):
                yield from rows


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 0 if all is well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="kernels whose name holds this")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    options = parser.parse_args(arguments)
    if INTERPRETED:
        parser.error("TRITON_INTERPRET is set: kernels would be interpreted, not compiled")
    layout = "{:<18} {:<7} {:<32} {:>9} {:>6} {:>7}  {}"
    print(layout.format("kernel", "target", "shape", "registers", "spills", "shared", "").rstrip())
    rows = []
    for row in compile_all(options.only, options.workers):
        rows.append(row)
        print(layout.format(*row[:6], row.problem or "").rstrip(), flush=True)
    if options.json:
        options.json.write_text(json.dumps([row._asdict() for row in rows], indent=1) + "\n")
    problems = sum(row.problem is not None for row in rows)
    print(f"{len(rows)} compiled, {problems} with a problem")
    return 1 if problems or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
