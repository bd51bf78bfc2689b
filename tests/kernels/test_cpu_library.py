"""Finding, checking and dispatching the C++ library."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from batchgen_kernels import cpu
from batchgen_kernels.cpu import library

from tests.kernels.cpu_cases import needs_kernels, paged_case


@needs_kernels
def test_the_highest_level_is_used_unless_another_is_set() -> None:
    names = cpu.levels()
    assert names[0] == "portable"
    assert cpu.features() == cpu.Features(names[-1], names[-1], torch.get_num_threads())
    cpu.set_level("portable")
    assert cpu.features().level == "portable"


@needs_kernels
def test_a_level_that_the_processor_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"level must be one of portable.*got sse9"):
        cpu.set_level("sse9")


@needs_kernels
def test_torch_and_the_kernels_run_on_one_openmp_runtime() -> None:
    paged_case([80, 90], [40, 50]).attend()
    torch.randn(64, 64) @ torch.randn(64, 64)
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "omp" in line}
    runtimes = {path for path in mapped if Path(path).name.startswith(("libgomp", "libomp", "libiomp"))}
    assert len(runtimes) == 1


@needs_kernels
def test_no_more_threads_run_than_configured() -> None:
    code = (
        "import os, torch; torch.set_num_threads(1)\n"
        "from tests.kernels.cpu_cases import paged_case\n"
        "case = paged_case([300] * 8, [30] * 8)\n"
        "before = len(os.listdir('/proc/self/task')); case.attend()\n"
        "assert len(os.listdir('/proc/self/task')) == before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_missing_library_is_no_error_until_a_kernel_is_called(tmp_path: Path) -> None:
    package = tmp_path / "batchgen_kernels"
    shutil.copytree(Path(library.__file__).parents[1], package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    code = (
        "import torch; from batchgen_kernels import cpu; assert not cpu.is_available()\n"
        "try: cpu.copy_blocks([torch.zeros(2, 1)], torch.tensor([[0, 1]]))\n"
        "except cpu.KernelsUnavailable as error: assert 'C++ compiler' in str(error)\n"
        "else: raise AssertionError('no error')\n"
    )
    # -P -S keep an editable install of this checkout out of the way.
    site = Path(torch.__file__).parents[1]
    command = [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(site)!r}]\n{code}"]
    subprocess.run(command, check=True, timeout=60)


@needs_kernels
def test_a_library_of_another_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "INTERFACE_VERSION", -1)
    opened = library._open.__wrapped__()
    assert isinstance(opened, cpu.KernelsUnavailable)
    assert "build it again" in str(opened)


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") and shutil.which("nm")), reason="needs a compiler and nm")
def test_no_code_of_a_newer_level_can_serve_an_older_one(tmp_path: Path) -> None:
    # A vague-linkage function compiled in one level's file could be the copy that the linker keeps for all levels.
    root = Path(__file__).parents[2]
    build = ["setup.py", "-q", "build_ext", "--build-temp", str(tmp_path), "--build-lib", str(tmp_path)]
    subprocess.run([sys.executable, *build], cwd=root, check=True, timeout=600)
    objects = sorted(tmp_path.rglob("level_*.o"))
    assert objects
    for path in objects:
        listing = subprocess.run(["nm", "-C", str(path)], check=True, capture_output=True, text=True).stdout
        weak = [line.split(maxsplit=2)[2] for line in listing.splitlines() if line[17:18] in {"W", "u"}]
        assert [name for name in weak if path.stem not in name] == []


@needs_kernels
@pytest.mark.parametrize("shape", [(0,), (), (3, 5), (5 << 20, 2)])
def test_a_tensor_in_huge_pages_begins_with_one(shape: tuple[int, ...]) -> None:
    x = cpu.empty_in_huge_pages(shape, torch.bfloat16).fill_(3)
    assert x.shape == shape
    assert x.is_contiguous()
    assert x.data_ptr() % (2 << 20) == 0
    assert bool((x == 3).all())
