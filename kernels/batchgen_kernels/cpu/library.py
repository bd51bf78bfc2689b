"""The shared library with the C++ kernels: where it is, whether it fits, and what this processor gets of it."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from importlib import machinery
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

INTERFACE_VERSION = 14
"""Of api.h; a library built from other sources is refused rather than called."""

_HUGE_PAGE = 2 << 20

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


class Features(NamedTuple):
    """What the kernels found at run time."""

    level: str
    """The instruction set in use: portable, avx2, avx512, avx512_bf16 or amx."""
    highest_level: str
    """The best one that processor and operating system support."""
    num_threads: int


class KernelsUnavailable(RuntimeError):
    """The C++ kernels are not built, or do not fit this Python code; the message says what to do."""


def _library_path() -> Path | None:
    here = Path(__file__).parent
    candidates = (here / f"_native{suffix}" for suffix in machinery.EXTENSION_SUFFIXES)
    return next((path for path in candidates if path.exists()), None)


def _offer_openmp() -> None:
    """Make torch's OpenMP runtime visible to the library, which is linked against none: two would fight for cores."""
    if hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        return
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    ctypes.CDLL(str(bundled[0]) if bundled else "libgomp.so.1", mode=ctypes.RTLD_GLOBAL)


@functools.cache
def _open() -> ctypes.CDLL | KernelsUnavailable:
    path = _library_path()
    if path is None:
        return KernelsUnavailable("the C++ kernels are not built: install with a C++ compiler (g++ 12 or newer)")
    try:
        _offer_openmp()
        library = ctypes.CDLL(str(path))
        version = int(library.bg_interface_version())
    except (OSError, AttributeError) as error:
        return KernelsUnavailable(f"{path.name} cannot be loaded ({error}); build it again (pip install .)")
    if version != INTERFACE_VERSION:
        return KernelsUnavailable(
            f"{path.name} has interface {version}, not {INTERFACE_VERSION}: it was built from other sources; "
            "build it again (pip install .)"
        )
    library.bg_level_name.restype = ctypes.c_char_p
    return library


def library() -> ctypes.CDLL:
    """Return the loaded library; raise KernelsUnavailable where there is none."""
    opened = _open()
    if isinstance(opened, KernelsUnavailable):
        raise opened
    return opened


def is_available() -> bool:
    """Say whether the C++ kernels can be called here."""
    return isinstance(_open(), ctypes.CDLL)


def why_unavailable() -> str:
    """Say why the C++ kernels cannot be called here, and what to do; empty where they can."""
    opened = _open()
    return str(opened) if isinstance(opened, KernelsUnavailable) else ""


def levels() -> list[str]:
    """Return the instruction-set levels that run on this processor, the plainest first."""
    return [library().bg_level_name(level).decode() for level in range(library().bg_highest_level() + 1)]


def features() -> Features:
    """Return the level in use, the highest one and the number of threads."""
    names = levels()
    return Features(names[library().bg_current_level()], names[-1], torch.get_num_threads())


def set_level(level: str) -> None:
    """Run all kernels on `level` from now on, for tests and benchmarks; ValueError where the processor lacks it.

    Packed weights must be made and used on one level.
    """
    names = levels()
    if level not in names:
        raise ValueError(f"level must be one of {', '.join(names)} here, got {level}")
    library().bg_set_level(names.index(level))


def set_num_threads(num_threads: int) -> None:
    """Set how many threads each kernel uses: torch's number, since both run on one pool."""
    torch.set_num_threads(num_threads)


def empty_in_huge_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor that begins with a huge page, where the system has such pages to give.

    Weights pass by, and blocks of a cache lie anywhere: with small pages most reads start with a walk of page tables.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    room = torch.empty(num_bytes + _HUGE_PAGE, dtype=torch.uint8)
    library().bg_advise_huge_pages(ctypes.c_void_p(room.data_ptr()), ctypes.c_int64(len(room)))
    start = -room.data_ptr() % _HUGE_PAGE
    return room[start : start + num_bytes].view(dtype).view(tuple(shape))


def dtype_code(x: Tensor, name: str, allowed: tuple[torch.dtype, ...]) -> int:
    """Return the code of x's dtype for api.h; TypeError unless it is one of `allowed`."""
    if x.dtype not in allowed:
        raise TypeError(f"{name} must be {' or '.join(str(dtype) for dtype in allowed)}, got {x.dtype}")
    return DTYPE_CODES[x.dtype]


def pointer(x: Tensor | None) -> int | None:
    """Return the address of x's first element, None for None."""
    return None if x is None else x.data_ptr()
