"""Builds the C++ kernels where a compiler is there; everything else about the package is in pyproject.toml."""

from __future__ import annotations

import os
import platform
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("kernels/batchgen_kernels/cpu")
# -ffp-contract=off: the order and the rounding of every sum is what the source says, on every processor level.
COMMON_FLAGS = [
    "-std=c++17", "-O3", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-g0",
    "-Wall", "-Wextra", "-Wno-uninitialized",
]  # fmt: skip
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mprefer-vector-width=512"]
AVX512_BF16 = [*AVX512, "-mavx512bf16"]
LEVEL_FLAGS = {
    "level_portable.cpp": [],
    "level_avx2.cpp": AVX2,
    "level_avx512.cpp": AVX512,
    "level_avx512_bf16.cpp": AVX512_BF16,
    "level_amx.cpp": [*AVX512_BF16, "-mavx512vbmi"],
}
IS_X86 = platform.machine().lower() in {"x86_64", "amd64"}


class BuildLevels(build_ext):
    """Compiles each processor level with its own flags; the right one is chosen at run time."""

    def build_extension(self, ext: Extension) -> None:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = [path for paths in pool.map(partial(self._compile, ext), ext.sources) for path in paths]
        # Not linked with -fopenmp: the OpenMP runtime that torch has loaded is used, so that there is only one.
        self.compiler.link_shared_object(objects, self.get_ext_fullpath(ext.name), target_lang="c++")

    def _compile(self, ext: Extension, source: str) -> list[str]:
        flags = [*COMMON_FLAGS, *LEVEL_FLAGS.get(Path(source).name, [])]
        return self.compiler.compile([source], self.build_temp, extra_postargs=flags, depends=ext.depends)


kernels = Extension(
    "batchgen_kernels.cpu._native",
    sources=sorted(
        str(path)
        for path in SOURCES.glob("*.cpp")
        if IS_X86 or not path.name.startswith("level_") or path.name == "level_portable.cpp"
    ),
    depends=sorted(str(path) for path in SOURCES.glob("*.h")),
    language="c++",
    optional=True,
)

setup(ext_modules=[kernels], cmdclass={"build_ext": BuildLevels})
