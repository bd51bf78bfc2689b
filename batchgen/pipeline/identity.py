"""What decides the rows of a job, as flat keys: the job file, the model's files, the inputs, what auto came to."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from batchgen import __version__
from batchgen.config import JobConfig
from batchgen.data.input_rows import InputScan
from batchgen.data.plan_record import Identity
from batchgen.resources import content_hash

MODEL_SUFFIXES = (".safetensors", ".json", ".jinja")
RESOLVED_KEYS = ("model.dtype", "model.max_model_len", "sampling.seed")
"""Keys of the job that may be left open; what they came to is stored, and stands for them from then on."""

_RECORDED_PACKAGES = ("torch", "transformers", "tokenizers", "pyarrow", "jinja2", "llguidance")
_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def hash_model_files(directory: Path, known: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """By file name: sha256, size, mtime in ns, inode. A file whose status is as `known` is not read again."""
    hashes: dict[str, list[Any]] = {}
    for path in sorted(directory.iterdir()):
        if path.suffix not in MODEL_SUFFIXES or path.name.startswith("."):
            continue
        status = path.stat()
        now = [status.st_size, status.st_mtime_ns, status.st_ino]
        before = known.get(path.name)
        if before is not None and before[1:] == now:
            hashes[path.name] = list(before)
        else:
            hashes[path.name] = [content_hash(path), *now]
    return hashes


def identity_of(
    job: JobConfig, scan: InputScan, model_hashes: Mapping[str, list[Any]], resolved: Mapping[str, Any]
) -> Identity:
    """Everything that decides the rows; `resolved` takes the place of what the job leaves open, and adds to it."""
    identity: Identity = job.identity()
    for key in RESOLVED_KEYS:
        if identity.get(key) in (None, "auto") and key in resolved:
            identity[key] = resolved[key]
    identity.update({key: value for key, value in resolved.items() if key not in RESOLVED_KEYS})
    identity.update({f"model.files.{name}": entry[0] for name, entry in model_hashes.items()})
    identity.update(input_identity(scan, len(scan.files)))
    return identity


def input_identity(scan: InputScan, num_files: int) -> Identity:
    """The content of the first files of a scan; where a file lies and what it is called does not count."""
    return {f"input.files.{file.source}": file.sha256 for file in scan.files[:num_files]}


def without_inputs(identity: Identity) -> Identity:
    """The identity without the content of the inputs, which may grow."""
    return {key: value for key, value in identity.items() if not key.startswith("input.files.")}


def resolved_of(identity: Identity) -> Identity:
    """From a stored identity, what a later run takes for the keys that its job leaves open."""
    return {key: identity[key] for key in identity if key in RESOLVED_KEYS or key.startswith("resolved.")}


def recorded_facts() -> dict[str, Any]:
    """Versions and features of this machine: they should not change a token, so a difference only warns."""
    return {
        "batchgen": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "features": sorted(_cpu_features()),
        **{name: _version(name) for name in _RECORDED_PACKAGES},
    }


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_features() -> Iterable[str]:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return []
    flags = next((line for line in info.read_text().splitlines() if line.startswith("flags")), "")
    return set(flags.split()) & set(_CPU_FEATURES)


def warnings_of(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line for each recorded fact that differs."""
    return [
        f"{key} was {then.get(key)} when this output was begun, and is {now.get(key)} now; rows should not differ"
        for key in sorted(then.keys() | now.keys())
        if then.get(key) != now.get(key)
    ]
