"""Everything that only a GPU can prove, in a few minutes, without a network: `make gpu-check`, or this module alone.

Kernels against their references; each kernel against the copy bandwidth and the matrix rate of the same run; a decode
step captured as a CUDA graph against the eager one and against its floor; greedy tokens of a tiny model against the
processor's; the engine against transformers' continuous batching; the share of time in which the GPU idles.
Each section runs in a process of its own, since a faulty kernel spoils its process. Writes one JSON.
`--dry-run` walks through all of it on a processor, at sizes that say nothing about speed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from benchmarks import gpu_engine, gpu_references
from benchmarks.decode_step import measure_decode_step
from benchmarks.gpu_engine import Workload
from benchmarks.gpu_sizes import DRY_RUN, FULL, Sizes
from benchmarks.kernels_gpu import measure_all

SECTION_SECONDS = 300


class Target(NamedTuple):
    """What an H200 should reach."""

    name: str
    least: float
    value: Callable[[dict[str, Any]], float]


def _share(results: dict[str, Any], kernel: str) -> float:
    return max(float(row["share_of_floor"]) for row in results["kernels"]["kernels"] if row["kernel"] == kernel)


def _prefix_gain(results: dict[str, Any]) -> float:
    rows = [row for row in results["kernels"]["kernels"] if " shared" in row["shape"]]
    once = next(row for row in rows if "once" in row["kernel"])
    each = next(row for row in rows if "once" not in row["kernel"])
    return float(each["seconds"] / once["seconds"])


def _ratio(results: dict[str, Any]) -> float:
    return float(results["transformers"]["seconds"]["uniform"] / results["engine"]["seconds"]["uniform"])


TARGETS = (
    Target("decode attention, share of the copy bandwidth", 0.80, lambda r: _share(r, "paged_attention decode")),
    Target(
        "decode step of the 8B shape, share of its floor", 0.75, lambda r: float(r["decode_step"]["share_of_floor"])
    ),
    Target("share of time in which the GPU works", 0.95, lambda r: 1 - float(r["engine"]["profile"]["idle_share"])),
    Target("against transformers' continuous batching", 2.0, _ratio),
    Target("shared-prefix attention against unshared, 64 x 4k", 8.0, _prefix_gain),
)


def _workloads(sizes: Sizes) -> dict[str, Workload]:
    count, vocabulary = sizes.num_prompts, sizes.config.vocab_size
    return {
        "uniform": Workload.uniform(count, *sizes.lengths, vocabulary),
        "shared prefix": Workload.uniform(
            count, sizes.lengths[0] // 5 + 1, sizes.lengths[0], vocabulary, sizes.engine_prefix
        ),
    }


def _references(scratch: Path, device: str, sizes: Sizes) -> dict[str, Any]:
    return gpu_references.compare_all(torch.device(device))


def _kernels(scratch: Path, device: str, sizes: Sizes) -> dict[str, Any]:
    return measure_all(torch.device(device), sizes)


def _decode_step(scratch: Path, device: str, sizes: Sizes) -> dict[str, Any]:
    return measure_decode_step(sizes, torch.device(device))


def _tiny_tokens(scratch: Path, device: str, sizes: Sizes) -> dict[str, Any]:
    return gpu_engine.tokens_equal_those_of_the_processor(scratch / "tiny", device)


def _engine(scratch: Path, device: str, sizes: Sizes) -> dict[str, Any]:
    return gpu_engine.time_engine(scratch / "model", device, _workloads(sizes), sizes.profiled_steps)


def _transformers(scratch: Path, device: str, sizes: Sizes) -> dict[str, Any]:
    return gpu_engine.time_transformers(scratch / "model", device, _workloads(sizes))


SECTIONS: dict[str, Callable[[Path, str, Sizes], dict[str, Any]]] = {
    "references": _references,
    "kernels": _kernels,
    "decode_step": _decode_step,
    "tiny_tokens": _tiny_tokens,
    "engine": _engine,
    "transformers": _transformers,
}


def _run_section(name: str, scratch: Path, device: str, *, is_dry_run: bool = False) -> dict[str, Any]:
    """Run a section in a process of its own; what goes wrong there is its result."""
    output = scratch / f"{name}.json"
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--section", name, "--scratch", str(scratch)]
    command += ["--dry-run"] if is_dry_run else []
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if is_dry_run else {})
    try:
        done = subprocess.run(
            [*command, "--device", device],
            stderr=subprocess.PIPE,
            text=True,
            timeout=SECTION_SECONDS,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"took more than {SECTION_SECONDS} s"}
    if done.returncode:
        return {"failed": done.stderr[-4000:]}
    return dict(json.loads(output.read_text()))


def _verdict(target: Target, results: dict[str, Any]) -> dict[str, Any]:
    """Whether a target is reached; value None where its section did not run."""
    try:
        value = target.value(results)
    except (KeyError, ValueError, StopIteration):
        return {"target": target.name, "least": target.least, "value": None, "reached": False}
    return {"target": target.name, "least": target.least, "value": value, "reached": value >= target.least}


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "processor"


def check(device: str, sections: list[str], scratch: Path, *, is_dry_run: bool = False) -> dict[str, Any]:
    """Run sections one after another; returns their results, the targets, and whether all is well."""
    results: dict[str, Any] = {"device": _device_name(device), "torch": torch.__version__, "triton": triton.__version__}
    if {"engine", "transformers"} & set(sections):
        gpu_engine.save_random_model((DRY_RUN if is_dry_run else FULL).config, scratch / "model", torch.bfloat16)
    for name in sections:
        print(f"{name} ...", file=sys.stderr, flush=True)
        results[name] = _run_section(name, scratch, device, is_dry_run=is_dry_run)
    # A dry run says nothing about speed.
    results["targets"] = [] if is_dry_run else [_verdict(target, results) for target in TARGETS]
    results["ok"] = all("failed" not in results[name] and results[name].get("ok", True) for name in sections)
    return results


def main(arguments: list[str] | None = None) -> int:
    """Run the sections and write the JSON; 0 if all ran and every comparison held, whatever the targets say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("gpu-check.json"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dry-run", action="store_true", help="on the processor, at tiny sizes")
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.section:
        result = SECTIONS[options.section](options.scratch, options.device, DRY_RUN if options.dry_run else FULL)
        (options.scratch / f"{options.section}.json").write_text(json.dumps(result))
        return 0
    if options.dry_run:
        options.device = "cpu"
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("no GPU here; `make kernels` proves what can be proved without one", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        results = check(options.device, options.only, Path(scratch), is_dry_run=options.dry_run)
    options.output.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps({name: results[name] for name in ("device", "targets", "ok")}, indent=1))
    return 0 if results["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
