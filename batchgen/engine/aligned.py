"""Functions of single numbers whose result does not depend on where the number stands in its tensor.

torch computes silu, sigmoid and the like for whole vector registers in one way, and for what is left at the end of a
tensor, or of a thread's share of it, in another, which may differ in the last bit. So a token's hidden state would
depend on how many tokens are computed with it. Here such functions get tensors whose every share fills registers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

REGISTER = 64
"""Elements; every vector loop of torch takes a divisor of it at a time."""

SHARE = 32768
"""torch gives no thread fewer elements than that, ..."""

GELU_SHARED = 16384
"""... but for gelu, which is divided among all threads beyond so many."""

_NAMES = ("celu", "elu", "gelu", "logsigmoid", "mish", "selu", "sigmoid", "silu", "softplus")
CURVED: frozenset[Callable[..., Any]] = frozenset(
    getattr(place, name) for place in (torch, Tensor, functional) for name in _NAMES if hasattr(place, name)
)
"""Approximated, each way by its own formula. Not so cos, sin, tanh and exp, whose last registers torch fills itself."""


def aligned_size(num_elements: int) -> int:
    """The next number of elements that torch cuts into shares of whole registers."""
    threads = torch.get_num_threads()
    while True:
        num_shares = max(1, min(threads, -(-num_elements // SHARE)))
        unit = REGISTER * (math.lcm(threads, num_shares) if num_elements > GELU_SHARED else 1)
        if num_elements % unit == 0:
            return num_elements
        num_elements += unit - num_elements % unit


def aligned_rows(num_rows: int, width: int) -> int:
    """The next number of rows of `width` elements that torch cuts into shares of whole registers."""
    while aligned_size(num_rows * width) != num_rows * width:
        num_rows += 1
    return num_rows


class AlignedFunctions(TorchFunctionMode):
    """While it is entered, curved functions are computed over whole registers."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Called by torch in place of every function."""
        options = dict(kwargs or {})
        if func not in CURVED:
            return func(*args, **options)
        x, *others = args or (options.pop("input"),)
        options.pop("inplace", None)
        return _over_whole_registers(func, x, others, options)


def _over_whole_registers(
    func: Callable[..., Any], x: Tensor, others: Sequence[Any], options: Mapping[str, Any]
) -> Tensor:
    size = x.numel()
    flat = x.reshape(-1)
    padding = aligned_size(size) - size
    if padding:
        flat = functional.pad(flat, (0, padding))
    result: Tensor = func(flat, *others, **options)
    return result[:size].view(x.shape)


def align_functions(model: nn.Module, run: Callable[[], object]) -> list[nn.Module]:
    """Align the curved functions of every module that calls one itself while `run` runs the model; returns these."""
    with _watching(model) as owners:
        run()
    for module in owners:
        module.forward = _aligned(module.forward)
    return owners


def _aligned(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with AlignedFunctions():
            return forward(*args, **kwargs)

    return run


class _Watch(TorchFunctionMode):
    """Notes the module that is running whenever a curved function is called."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[nn.Module] = []
        self.callers: dict[nn.Module, None] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in CURVED and self.running:
            self.callers[self.running[-1]] = None
        return func(*args, **(kwargs or {}))


@contextmanager
def _watching(model: nn.Module) -> Iterator[list[nn.Module]]:
    watch = _Watch()
    owners: list[nn.Module] = []

    def enter(module: nn.Module, _: object) -> None:
        watch.running.append(module)

    def leave(*_: object) -> None:
        watch.running.pop()

    hooks = []
    for module in model.modules():
        hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        with watch:
            yield owners
    finally:
        for hook in hooks:
            hook.remove()
    owners.extend(watch.callers)
