"""The wheel, built and installed elsewhere: what a user of a package index gets."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    # From a copy of what is checked in: a build leaves its own files beside the sources.
    source = directory / "source"
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    command = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(directory), str(source)]
    subprocess.run(command, check=True)
    (built,) = directory.glob("batchgen-*.whl")
    return built


def test_the_wheel_holds_code_kernels_jobs_schemas_and_licence(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        *("batchgen/cli.py", "batchgen/py.typed", "batchgen/commands/run.py"),
        *("batchgen/jobs/quickstart.yaml", "batchgen/jobs/quickstart.jsonl", "batchgen/schemas/job.v1.schema.json"),
        *("batchgen_kernels/__init__.py", "batchgen_kernels/cpu/__init__.py"),
    }
    assert wanted <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "kernels/"))]


def test_the_installed_wheel_validates_a_job_that_it_ships(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    subprocess.run([*PIP, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)], check=True)
    environ = {**os.environ, "PYTHONPATH": str(target)}
    job = target / "batchgen/jobs/quickstart.yaml"
    command = [str(target / "bin/batchgen"), "validate", str(job)]
    result = subprocess.run(command, cwd=tmp_path, env=environ, check=True, capture_output=True, text=True)
    assert result.stdout == f"{job}: valid\n"
    where = "import batchgen; print(batchgen.__file__)"
    found = subprocess.run([sys.executable, "-c", where], cwd=tmp_path, env=environ, check=True, capture_output=True)
    assert Path(found.stdout.decode().strip()).is_relative_to(target)
