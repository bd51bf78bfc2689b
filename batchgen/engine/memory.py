"""How much memory a machine has, how many blocks fit into some of it, and how it is made ready."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread, get_native_id
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
MEMINFO = Path("/proc/meminfo")
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14 and later; elsewhere the call fails, and pages come as they are written."""
_TOUCHED_AT_A_TIME = 2 << 20


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


class TouchAhead:
    """Has the system find memory for the first `limit` bytes of all tensors together; changes no content.

    A page is found and cleared when it is first written, which takes longer than to compute what is written; a block of
    a KV cache is first written in the middle of a step. A thread does it beside the loading, on a core that nobody else
    wants: the threads of a matrix product wait for each other, so one that loses its core delays all.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], limit: int) -> None:
        """Begin; the thread ends by itself."""
        self._tensors = tensors
        self._left = deque(_pieces(tensors, limit))
        self._thread = Thread(target=self._touch_when_idle, name="touch-ahead", daemon=True)
        self._thread.start()

    def finish(self) -> Thread:
        """Have what is left done with no regard for others; all is when the thread that is returned has ended."""
        thread = Thread(target=self._touch_the_rest, name="touch-rest", daemon=True)
        thread.start()
        return thread

    def _touch_the_rest(self) -> None:
        self._touch()
        self._thread.join()

    def _touch_when_idle(self) -> None:
        if hasattr(os, "SCHED_IDLE"):
            with suppress(OSError):
                os.sched_setscheduler(get_native_id(), os.SCHED_IDLE, os.sched_param(0))
            self._touch()

    def _touch(self) -> None:
        system = ctypes.CDLL(None)
        with suppress(IndexError):
            while True:
                begin, size = self._left.popleft()
                if system.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), _POPULATE_WRITE):
                    return


def _pieces(tensors: Sequence[torch.Tensor], limit: int) -> Iterator[tuple[int, int]]:
    """Addresses and sizes of what is touched at a time, all tensors in turns."""
    total = sum(tensor.nbytes for tensor in tensors)
    share = min(1.0, limit / max(1, total))
    regions = [(tensor.data_ptr(), int(tensor.nbytes * share)) for tensor in tensors]
    for done in range(0, max((num_bytes for _, num_bytes in regions), default=0), _TOUCHED_AT_A_TIME):
        for start, num_bytes in regions:
            begin = (start + done) // mmap.PAGESIZE * mmap.PAGESIZE
            size = start + min(done + _TOUCHED_AT_A_TIME, num_bytes) - begin
            if size > 0:
                yield begin, size
