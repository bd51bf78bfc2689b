"""How much memory a machine has, and how many blocks fit into some of it."""

from __future__ import annotations

from pathlib import Path

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


def num_blocks_for(budget: int, bytes_per_block: int, most_useful: int) -> int:
    """Blocks of a pool of `budget` bytes, never more than can be of use. Raises ValueError if it does not hold one."""
    num_blocks = min(budget // bytes_per_block, most_useful)
    if num_blocks < 1:
        raise ValueError(f"{budget} bytes do not hold one block of {bytes_per_block} bytes")
    return num_blocks
