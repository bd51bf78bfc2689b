"""How the Triton kernels are declared and launched; imports without Triton, where only the references serve.

A launcher describes each launch as a `Launch`, and runs it. Tests read the description on tensors of the "meta" device,
and `benchmarks/compile_kernels.py` compiles from it, so what is proved without a GPU is what runs on one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    import triton
    import triton.language
except ImportError:
    triton = None

tl: Any = None if triton is None else triton.language
"""`triton.language`."""

INTERPRETED: bool = triton is not None and bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on CPU tensors; set by TRITON_INTERPRET=1 before the import."""


def jit(function: Callable[..., Any]) -> Any:
    """Declare a Triton kernel, or a helper of one; without Triton, leave the function as it is."""
    return function if triton is None else triton.jit(function)


def runs_on_triton(x: Tensor) -> bool:
    """Whether the Triton kernels serve tensors like this one."""
    return x.is_cuda and triton is not None


def num_processors(device: torch.device) -> int:
    """Return the device's multiprocessors; those of an H100 or H200 where it is no GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is at least n (n >= 1)."""
    return 1 << (n - 1).bit_length()


def check_fp8(cache: Tensor) -> None:
    """Raise ValueError for an fp8 cache on an NVIDIA device that cannot convert to it, before sm_89."""
    if cache.dtype == torch.float8_e4m3fn and cache.is_cuda and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(cache.device)
        if (major, minor) < (8, 9):
            raise ValueError(f"an fp8 KV cache needs sm_89 or newer, this device is sm_{major}{minor}; use int8")


class Launch(NamedTuple):
    """One launch of one kernel: everything but the device."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Tensor | int | float]
    constants: dict[str, Any]
    """Values of the kernel's constexpr parameters."""
    num_warps: int = 4
    num_stages: int = 2

    def run(self) -> None:
        """Launch on the current stream; nothing is launched for an empty grid.

        Fused multiply-adds are only those that a kernel writes itself, so that one formula has one result.
        """
        if all(self.grid):
            self.kernel[self.grid](
                **self.arguments,
                **self.constants,
                num_warps=self.num_warps,
                num_stages=self.num_stages,
                enable_fp_fusion=False,
            )
