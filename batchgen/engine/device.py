"""What the engine needs of a device beside its kernels, and the only place that knows whether it runs on its own.

A processor has run a step when the call returns. A GPU takes steps in their order and runs them by itself: what is
uploaded travels behind the steps before it, what is fetched travels behind the step that computes it, and only the
function that `fetch` returns waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from batchgen.engine.memory import available_memory

Array = NDArray[Any]

PROCESSOR_SHARE = 0.5
"""Of what is available when the engine starts; the rest is for activations, the reader and the writer."""

GPU_RESERVE = 0.06
"""Of all memory of a GPU, for fragments, graphs and what libraries take late."""

DECODE_BUCKETS = (1, 2, 4, 8, *range(16, 129, 16), *range(160, 513, 32), *range(576, 1025, 64))
"""Numbers of sequences for which a GPU keeps a recorded decode step."""


class Device(Protocol):
    """One device, as the runner and the sampler use it."""

    @property
    def where(self) -> torch.device:
        """Where its tensors live."""
        ...

    @property
    def is_asynchronous(self) -> bool:
        """Whether a step runs by itself, so that the next one can be planned and launched meanwhile."""
        ...

    @property
    def decode_buckets(self) -> tuple[int, ...]:
        """Numbers of sequences, rising, that decode steps are padded to so as to be recorded; () where it is no use."""
        ...

    def upload(self, *arrays: Array) -> list[torch.Tensor]:
        """Tensors with the arrays' contents at this moment or later: leave them as they are. Nothing waits."""
        ...

    def fetch(self, *tensors: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        """Begin to bring tensors to the host; the function returned waits until they are there."""
        ...

    def record(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """A function that does again what `step` does on the same tensors, at less cost to the host."""
        ...

    def cache_memory(self, run_largest_step: Callable[[], object]) -> int:
        """Bytes that the KV cache may take when nobody says how many."""
        ...


class Processor:
    """The processor: every call has run when it returns."""

    where = torch.device("cpu")
    is_asynchronous = False
    decode_buckets: tuple[int, ...] = ()

    def upload(self, *arrays: Array) -> list[torch.Tensor]:
        """The arrays themselves."""
        return [torch.from_numpy(array) for array in arrays]

    def fetch(self, *tensors: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        """They are here."""
        return lambda: list(tensors)

    def record(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """The step itself."""
        return step

    def cache_memory(self, run_largest_step: Callable[[], object]) -> int:
        """A share of what the system has; a step is small beside it, and is not run."""
        return int(available_memory() * PROCESSOR_SHARE)


class Gpu:
    """A GPU through CUDA or ROCm; everything goes through its current stream, in order."""

    is_asynchronous = True

    def __init__(self, where: torch.device, decode_buckets: tuple[int, ...] = DECODE_BUCKETS) -> None:
        self.where = where
        self.decode_buckets = decode_buckets
        self._graph_pool: Any = None

    def upload(self, *arrays: Array) -> list[torch.Tensor]:
        """All of them in one transfer from page-locked memory, which is kept until that has run."""
        packed, places = pack(arrays)
        on_device = torch.from_numpy(packed).pin_memory().to(self.where, non_blocking=True)
        return unpack(on_device, arrays, places)

    def fetch(self, *tensors: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        """Copies to page-locked memory, and an event behind them."""
        hosts = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        for host, tensor in zip(hosts, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()

        def wait() -> list[torch.Tensor]:
            event.synchronize()
            return hosts

        return wait

    def record(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """A CUDA graph. The step runs once before it is captured, so that its kernels are compiled and loaded."""
        side = torch.cuda.Stream(self.where)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self.where))
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream(self.where).wait_stream(side)
        if self._graph_pool is None:
            self._graph_pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_pool):
            result = step()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay

    def cache_memory(self, run_largest_step: Callable[[], object]) -> int:
        """What is free, less what a step of the largest kind takes at its height, less a reserve."""
        torch.cuda.synchronize(self.where)
        torch.cuda.reset_peak_memory_stats(self.where)
        held = torch.cuda.memory_allocated(self.where)
        run_largest_step()
        torch.cuda.synchronize(self.where)
        height = torch.cuda.max_memory_allocated(self.where) - held
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.where)
        return int(free - height - GPU_RESERVE * total)


PROCESSOR = Processor()


def device_at(where: torch.device, *, records: bool = True) -> Device:
    """The device that tensors of `where` live on; without `records` a GPU launches every decode step anew."""
    return PROCESSOR if where.type == "cpu" else Gpu(where, DECODE_BUCKETS if records else ())


ALIGNMENT = 16
"""Bytes; kernels are compiled anew for addresses that are aligned otherwise."""


def pack(arrays: tuple[Array, ...]) -> tuple[NDArray[np.uint8], list[int]]:
    """The arrays' bytes in one, and where each begins."""
    places, end = [], 0
    for array in arrays:
        places.append(end)
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    packed = np.zeros(end, np.uint8)
    for array, place in zip(arrays, places, strict=True):
        packed[place : place + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return packed, places


def unpack(packed: torch.Tensor, arrays: tuple[Array, ...], places: list[int]) -> list[torch.Tensor]:
    """Views of what `pack` made, as tensors of the arrays' types and shapes."""
    return [
        packed[place : place + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for array, place in zip(arrays, places, strict=True)
    ]
