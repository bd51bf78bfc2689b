"""Kinds of machines and what is recommended for each: `batchgen plan` and docs/block-size.md take it from here."""

from __future__ import annotations

import subprocess
from typing import NamedTuple

from batchgen.pipeline.cluster.placement import Machine, this_machine

SMALL_CORES = 4
GIGABYTE = 10**9


class MachineClass(NamedTuple):
    """One kind of machine."""

    name: str
    block_size: int
    most_sequences: int
    """`plan` looks for the best `engine.max_sequences` up to here."""
    workers: int | str
    """`run.workers`."""
    reason: str
    """Why, as far as code or measurement says."""


SMALL_PROCESSOR = MachineClass(
    "laptop or CI machine, up to 4 cores",
    block_size=16,
    most_sequences=512,
    workers=1,
    reason="All cores share one engine. `engine.kv_cache_memory` as a figure: `auto` takes half of what is free.",
)
PROCESSOR = MachineClass(
    "one processor, more cores",
    block_size=16,
    most_sequences=512,
    workers=1,
    reason="The kernels spread a step over all cores; a second engine would read the weights a second time.",
)
NUMA_SERVER = MachineClass(
    "server with several NUMA nodes",
    block_size=16,
    most_sequences=512,
    workers="auto",
    reason="A worker for each node, pinned to its cores, has weights and KV cache in memory of its own node.",
)
SMALL_GPU = MachineClass(
    "one GPU of about 24 GB",
    block_size=16,
    most_sequences=1024,
    workers=1,
    reason="The cache is what is short: beside a large model `model.kv_dtype: int8` doubles what it holds.",
)
GPU = MachineClass(
    "one GPU of about 80 GB",
    block_size=16,
    most_sequences=1024,
    workers=1,
    reason="`engine.kv_cache_memory: auto` takes what a trial step leaves.",
)
LARGE_GPU = MachineClass(
    "one GPU of about 141 GB",
    block_size=16,
    most_sequences=1024,
    workers=1,
    reason="`engine.kv_cache_memory: auto` takes what a trial step leaves.",
)
MANY_GPUS = MachineClass(
    "several GPUs",
    block_size=16,
    most_sequences=1024,
    workers="auto",
    reason="A worker for each GPU, each with the whole model: models are not split.",
)

CLASSES = (SMALL_PROCESSOR, PROCESSOR, NUMA_SERVER, SMALL_GPU, GPU, LARGE_GPU, MANY_GPUS)


def class_of(machine: Machine, device: str, gpu_bytes: int = 0) -> MachineClass:
    """The class of a machine whose engine runs on `device`; `gpu_bytes` are those of its smallest GPU, 0 if unknown."""
    if device.partition(":")[0] == "cpu":
        if len(machine.nodes) > 1:
            return NUMA_SERVER
        return SMALL_PROCESSOR if sum(map(len, machine.nodes)) <= SMALL_CORES else PROCESSOR
    if len(machine.gpus) > 1 and ":" not in device:
        return MANY_GPUS
    return LARGE_GPU if gpu_bytes > 100 * GIGABYTE else GPU if gpu_bytes > 40 * GIGABYTE else SMALL_GPU


def this_class(device: str) -> MachineClass:
    """The class of this machine, with `device` as the engine's: cpu, cuda or cuda:N."""
    return class_of(this_machine(), device, 0 if device == "cpu" else smallest_gpu())


def smallest_gpu() -> int:
    """Bytes of the smallest GPU that nvidia-smi lists; 0 where it lists none."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return min((int(line) << 20 for line in listed.split() if line.isdigit()), default=0)
