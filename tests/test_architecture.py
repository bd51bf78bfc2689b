"""Imports go one way: a new arrow fails here, and needs a decision record."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import batchgen.data

ROOT = Path(__file__).parent.parent
KERNELS = ROOT / "kernels"

LAYERS = {
    "leaf": {"leaf"},
    "config": {"leaf", "config"},
    "data": {"leaf", "config", "data"},
    "engine": {"leaf", "engine", "kernels"},
    "pipeline": {"leaf", "config", "data", "engine", "pipeline"},
    "report": {"leaf", "config", "data", "pipeline", "report"},
    "commands": {"leaf", "config", "data", "engine", "pipeline", "report", "commands"},
    "cli": {"leaf", "config", "commands", "cli"},
    "kernels": {"kernels"},
}
"""Layer -> the layers it may import."""

NEVER = {
    # Only the tokenizer takes something of transformers, and of it what works without torch.
    "leaf": {"torch", "yaml", "pyarrow", "datasets", "dask", "distributed", "typer"},
    "config": {"torch", "transformers", "pyarrow", "datasets", "dask", "distributed", "typer"},
    "data": {"torch", "transformers", "dask", "distributed", "typer", "yaml"},
    "engine": {"yaml", "datasets", "dask", "distributed", "pyarrow", "pandas", "typer"},
    "pipeline": {"typer", "yaml"},
    "report": {"torch", "transformers", "typer", "yaml", "tqdm"},
    "commands": {"torch", "transformers"},
    "cli": {"torch", "transformers", "pyarrow", "tqdm"},
}
"""Layer -> packages of others that it must not import."""

KERNELS_MAY_IMPORT = {"torch", "triton", "numpy", "batchgen_kernels"}

LAZY_PLACES = {"batchgen/__init__.py", "batchgen/cli.py"}
"""The only places that import while running: torch must not be paid for by `batchgen --help`."""


def sources() -> list[Path]:
    return sorted([*(ROOT / "batchgen").rglob("*.py"), *KERNELS.rglob("*.py")])


def layer_of(module: str) -> str:
    """`batchgen.data.reader` -> `data`, `batchgen.config_yaml` -> `config`; other modules beside them are leaves."""
    parts = module.split(".")
    if parts[0] == "batchgen_kernels":
        return "kernels"
    name = parts[1] if len(parts) > 1 else "leaf"
    name = name.split("_")[0]
    return name if name in LAYERS else "leaf"


def module_of(path: Path) -> str:
    base = KERNELS if path.is_relative_to(KERNELS) else ROOT
    return ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")


def imports_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            # `from batchgen import config` imports a module, `from batchgen import __version__` does not.
            names = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "batchgen" else []
            yield from ((node.lineno, name) for name in names or [str(node.module)])


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_module_imports_only_what_its_layer_may(path: Path) -> None:
    layer = layer_of(module_of(path))
    wrong = []
    for line, name in imports_of(ast.parse(path.read_text())):
        package = name.split(".")[0]
        if package in {"batchgen", "batchgen_kernels"}:
            # The package's own __init__ names the engine for type checkers, and loads it lazily.
            is_allowed = layer_of(name) in LAYERS[layer] or path == ROOT / "batchgen/__init__.py"
        elif layer == "kernels":
            is_allowed = package in KERNELS_MAY_IMPORT | sys.stdlib_module_names
        else:
            is_allowed = package not in NEVER[layer]
        if not is_allowed:
            wrong.append(f"{path.relative_to(ROOT)}:{line}: {layer} imports {name}")
    assert not wrong


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_stand_at_the_top_of_the_module(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    inside = [(function.name, line) for function in functions for line, _ in imports_of(function)]
    calls = [node for function in functions for node in ast.walk(function) if isinstance(node, ast.Call)]
    lazy = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "import_module"]
    assert not inside
    assert not lazy or name in LAZY_PLACES


def loaded_by(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after running `code`."""
    script = f"import sys\n{code}\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True)
    return set(result.stdout.splitlines()[-1].split())


def test_the_data_layer_loads_without_torch() -> None:
    modules = [name for _, name, _ in pkgutil.walk_packages(batchgen.data.__path__, "batchgen.data.")]
    loaded = loaded_by("\n".join(f"import {name}" for name in modules))
    assert {"batchgen"} <= loaded
    assert not {"torch", "triton"} & loaded


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["validate", "jobs/quickstart.yaml"], ["schema"]])
def test_light_commands_load_nothing_heavy(arguments: list[str]) -> None:
    code = f"import runpy\nsys.argv = ['batchgen', *{arguments!r}]\n"
    code += "try:\n    runpy.run_module('batchgen.cli', run_name='__main__')\nexcept SystemExit as end:\n"
    code += "    assert not end.code, end.code"
    loaded = loaded_by(code)
    assert "typer" in loaded
    assert not {"torch", "transformers", "pyarrow", "numpy", "huggingface_hub", "tokenizers"} & loaded
    assert arguments != ["--help"] or not {"pydantic", "yaml", "jinja2"} & loaded
