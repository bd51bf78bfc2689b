"""How much memory the KV cache may take, and how much a machine has."""

from __future__ import annotations

from pathlib import Path

MEMORY_SHARE = 0.5
"""Of what is available when the engine starts; the rest is for activations, the reader and the writer."""

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
MEMINFO = Path("/proc/meminfo")


def available_memory() -> int:
    """Bytes this process can still take, at most what its container allows; 4 GiB where the system does not say."""
    available = 4 << 30
    if MEMINFO.exists():
        fields = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    if CGROUP_LIMIT.exists() and (limit := CGROUP_LIMIT.read_text().strip()).isdigit():
        available = min(available, int(limit))
    return available


def num_blocks_for(kv_cache_memory: int | None, bytes_per_block: int, most_useful: int, available: int) -> int:
    """Blocks of the pool: what `kv_cache_memory` (bytes; None: auto) holds, never more than can be of use.

    Raises ValueError where it does not hold one block.
    """
    budget = int(available * MEMORY_SHARE) if kv_cache_memory is None else kv_cache_memory
    num_blocks = min(budget // bytes_per_block, most_useful)
    if num_blocks < 1:
        raise ValueError(f"kv_cache_memory of {budget} bytes does not hold one block of {bytes_per_block} bytes")
    return num_blocks
