"""A device on the processor that behaves like a GPU, and notices when the host waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from batchgen.engine import model_runner
from batchgen.engine.batch import Batch
from batchgen.engine.device import Array, pack, unpack
from batchgen.engine.engine import Engine
from batchgen.engine.loading import EngineOptions, EngineParts, load_parts
from batchgen.engine.ops import Ops

CPU = torch.device("cpu")


class Waited(AssertionError):
    """The host asked for a value that a GPU might not have computed yet."""


@dataclass
class WatchedDevice:
    """Takes steps as a GPU does; counts what goes to and fro."""

    decode_buckets: tuple[int, ...] = (1, 2, 4, 8, 16)
    where: torch.device = CPU
    is_asynchronous: bool = True
    memory: int = 1 << 24
    is_watching: bool = False
    """While the host launches a step, but not inside of a kernel."""
    num_uploads: int = 0
    num_waits: int = 0
    num_recorded: int = 0
    num_replayed: int = 0
    num_largest_steps: int = 0

    def upload(self, *arrays: Array) -> list[torch.Tensor]:
        """Through one packed transfer."""
        self.num_uploads += 1
        packed, places = pack(arrays)
        return unpack(torch.from_numpy(packed), arrays, places)

    def fetch(self, *tensors: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        """What the tensors hold now."""
        copies = [tensor.clone() for tensor in tensors]

        def wait() -> list[torch.Tensor]:
            self.num_waits += 1
            return copies

        return wait

    def record(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """A recorded step reads nothing but its tensors: it is run here for what it does to them."""
        self.num_recorded += 1

        def replay() -> torch.Tensor:
            self.num_replayed += 1
            return step()

        return replay

    def cache_memory(self, run_largest_step: Callable[[], object]) -> int:
        """A fixed number, after the step has run."""
        run_largest_step()
        self.num_largest_steps += 1
        return self.memory


WAITING_OPERATIONS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique")


class _Watch(TorchDispatchMode):
    """Refuses operations whose result the host needs before it goes on."""

    def __init__(self, device: WatchedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._device.is_watching:
            name = func.__name__.split(".")[0]
            masks = name in ("index", "index_put", "index_put_") and any(
                isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in args[1]
            )
            if masks or name.startswith(WAITING_OPERATIONS):
                raise Waited(name)
        return func(*args, **(kwargs or {}))


def _refusing(name: str, device: WatchedDevice) -> Callable[..., Any]:
    original = getattr(torch.Tensor, name)

    def refuse(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if device.is_watching:
            raise Waited(name)
        return original(tensor, *args, **kwargs)

    return refuse


@contextmanager
def watching(device: WatchedDevice, is_on: bool = True) -> Iterator[None]:
    """From here on the host may not wait; with `is_on` False, it may again."""
    before, device.is_watching = device.is_watching, is_on
    try:
        yield
    finally:
        device.is_watching = before


def _as_kernel(function: Callable[..., Any], device: WatchedDevice) -> Callable[..., Any]:
    """What an op does on a processor stands for a kernel: the host that launches it sees nothing of it."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with watching(device, False):
            return function(*args, **kwargs)

    return kernel


def watched_parts(
    directory: Path, device: WatchedDevice, ops: Ops, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> EngineParts:
    """The parts of an engine on the device; Waited is raised where launching a step waits for it."""
    for name in ("tolist", "numpy", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, _refusing(name, device))
    # It is given arrays of the host alone, and what it makes of them in torch it makes there.
    monkeypatch.setattr(model_runner, "make_plans", _as_kernel(model_runner.make_plans, device))
    kernels = Ops(*(_as_kernel(op, device) if callable(op) else op for op in ops))
    kernels = kernels._replace(sample_steps=lambda *args: _as_kernel(ops.sample_steps(*args), device))
    parts = load_parts(EngineOptions(str(directory), device="cpu", **options), device, kernels)
    execute, sample = parts.runner.execute, parts.sampler.sample

    def watched_execute(batch: Batch, *drawn: torch.Tensor) -> torch.Tensor:
        with watching(device), _Watch(device):
            return execute(batch, *drawn)

    def watched_sample(*arguments: Any) -> Any:
        with watching(device), _Watch(device):
            return sample(*arguments)

    parts.runner.execute = watched_execute  # type: ignore[method-assign]
    parts.sampler.sample = watched_sample  # type: ignore[method-assign]
    return parts


def watched_engine(*arguments: Any, **options: Any) -> Engine:
    """An engine over `watched_parts`."""
    return Engine.from_parts(watched_parts(*arguments, **options))
