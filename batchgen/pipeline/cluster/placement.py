"""Where the workers of one machine run: a GPU each, or a group of cores each that shares its memory."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from batchgen.config import EngineConfig
from batchgen.errors import JobError

NODES = Path("/sys/devices/system/node")


class Placement(NamedTuple):
    """One worker's part of the machine."""

    cores: list[int]
    memory_share: float
    environ: dict[str, str]
    """Variables of the environment, set before the process starts."""


class Machine(NamedTuple):
    """What there is to share out."""

    nodes: list[list[int]]
    """Cores that this process may use, by NUMA node."""
    gpus: list[str]
    """What CUDA_VISIBLE_DEVICES calls them: indices or UUIDs."""


def this_machine(environ: Mapping[str, str] = os.environ, nodes: Path = NODES) -> Machine:
    """Cores and GPUs that this process may use."""
    return Machine(numa_nodes(os.sched_getaffinity(0), nodes), visible_gpus(environ))


def numa_nodes(allowed: Iterable[int], nodes: Path = NODES) -> list[list[int]]:
    """The allowed cores by node; one group where the system does not say."""
    left = set(allowed)
    groups = []
    for path in sorted(nodes.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:])):
        group = sorted(left & set(parse_cores(path.read_text())))
        if group:
            groups.append(group)
            left -= set(group)
    return [*groups, sorted(left)] if left else groups


def parse_cores(text: str) -> list[int]:
    """`0-2,8` -> 0, 1, 2, 8."""
    cores: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores.extend(range(int(first), int(last or first) + 1))
    return cores


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, by the names used there; else all that nvidia-smi lists, by UUID."""
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        # CUDA stops at the first device that is not there.
        names = [name.strip() for name in named.split(",")]
        end = next((at for at, name in enumerate(names) if name in ("", "-1", "NoDevFiles")), len(names))
        return names[:end]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return re.findall(r"^GPU \d+: .*\(UUID: ([^)]+)\)", listed, flags=re.MULTILINE)


def num_workers(wanted: int | str, engine: EngineConfig, machine: Machine) -> int:
    """`run.workers` as a number: auto is one per GPU, or per NUMA node where there is none or `device` is cpu."""
    if wanted != "auto":
        return int(wanted)
    if engine.device.startswith("cuda:"):
        return 1
    return len(machine.gpus) if uses_gpus(engine, machine) else max(1, len(machine.nodes))


def uses_gpus(engine: EngineConfig, machine: Machine) -> bool:
    """Whether the engines run on GPUs."""
    return engine.device.startswith("cuda") or (engine.device == "auto" and bool(machine.gpus))


def place(count: int, engine: EngineConfig, machine: Machine) -> list[Placement]:
    """Share a machine out among workers; JobError where there are more workers than GPUs."""
    groups = core_groups(count, machine.nodes)
    threads = [str(len(group)) if engine.threads == "auto" else str(engine.threads) for group in groups]
    if not uses_gpus(engine, machine):
        return [
            Placement(group, 1 / count, {"OMP_NUM_THREADS": number})
            for group, number in zip(groups, threads, strict=True)
        ]
    if engine.device.startswith("cuda:") and count > 1:
        raise JobError(f"engine.device: {engine.device} is one device, but run.workers is {count}; use cuda")
    if count > len(machine.gpus):
        raise JobError(
            f"run.workers: {count} workers need as many GPUs, and {len(machine.gpus)} are visible; use auto, or "
            "engine.device cpu"
        )
    return [
        Placement(group, 1.0, {"CUDA_VISIBLE_DEVICES": gpu}) for group, gpu in zip(groups, machine.gpus, strict=False)
    ]


def core_groups(count: int, nodes: list[list[int]]) -> list[list[int]]:
    """Cores for each of `count` workers, of one node each as far as that goes.

    A worker never spans two nodes unless there are fewer workers than nodes. With more workers than cores, cores are
    shared.
    """
    cores = [core for node in nodes for core in node]
    if count >= len(cores):
        return [[cores[at % len(cores)]] for at in range(count)]
    if count <= len(nodes):
        shares = _spread(len(nodes), count)
        starts = [sum(shares[:at]) for at in range(count)]
        return [
            [core for node in nodes[start : start + share] for core in node]
            for start, share in zip(starts, shares, strict=True)
        ]
    # As many workers on a node as it has of the cores, at least one, and never more than its cores.
    per_node = [1] * len(nodes)
    for _ in range(count - len(nodes)):
        room = [at for at, node in enumerate(nodes) if per_node[at] < len(node)]
        best = max(room, key=lambda at: len(nodes[at]) / (per_node[at] + 1))
        per_node[best] += 1
    groups = []
    for node, number in zip(nodes, per_node, strict=True):
        at = 0
        for share in _spread(len(node), number):
            groups.append(node[at : at + share])
            at += share
    return groups


def _spread(total: int, parts: int) -> list[int]:
    """Whole numbers that add up to `total`, as equal as can be."""
    return [total // parts + (at < total % parts) for at in range(parts)]
