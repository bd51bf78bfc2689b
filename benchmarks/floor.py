"""What no engine on this machine can beat with the same model: its matrix products alone, and the bytes of K and V.

The products are those of the very steps that the engine ran, in their order and at their shapes, each a bare call of
the kernel that the engine calls; the bytes are those that the steps must read, at copy bandwidth.
"""

from __future__ import annotations

import ctypes
import time
from array import array
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from batchgen_kernels import cpu
from batchgen_kernels.cpu.library import DTYPE_CODES, library
from batchgen_kernels.cpu.linear import LinearArgs

from batchgen import Engine
from batchgen.engine.batch import Batch
from batchgen.engine.fused import FusedGatedMLP
from batchgen.engine.linear import PackedLinear

COPY_BYTES = 256 << 20
_PRODUCTS_AFTER_ATTENTION = 3
"""Of a layer: the projection of attention's output, gate and up together, down."""


class StepShape(NamedTuple):
    """What of a step decides how long its products take."""

    num_tokens: int
    num_logits: int


class Steps:
    """The shapes of the steps of one run, and what attention had to read; noting one costs the run little."""

    def __init__(self) -> None:
        self.shapes: list[StepShape] = []
        self._block_ids: list[list[array[int]]] = []

    def note(self, batch: Batch) -> None:
        """One more step, as it is about to run."""
        self.shapes.append(StepShape(batch.num_tokens, len(batch.logits_layout().tokens)))
        tables = [sequence.table for sequence in batch.sequences]
        self._block_ids.append([table.block_ids[:] for table in tables if table is not None])

    def num_blocks_read(self) -> int:
        """Blocks of the cache over all steps; one that several sequences of a step share counts once."""
        return sum(len(set().union(*step)) for step in self._block_ids)


class Floor(NamedTuple):
    """Seconds."""

    products_s: float
    kv_s: float

    @property
    def total_s(self) -> float:
        """Of both."""
        return self.products_s + self.kv_s


def floor(engine: Engine, steps: Steps) -> Floor:
    """Time the floor of some steps, once, now: the machine is not the same from one minute to the next."""
    runner = engine._runner
    block_bytes = sum(tensor[0].nbytes for tensor in runner.cache.tensors)
    products_s = _seconds_of_products(runner.model, steps.shapes)
    return Floor(products_s, steps.num_blocks_read() * block_bytes / copy_bandwidth())


@torch.inference_mode()
def _seconds_of_products(model: Any, shapes: list[StepShape]) -> float:
    head = model.get_output_embeddings()
    body = list(_body(model, head))
    most = StepShape(*(max(column) for column in zip(*shapes, strict=True)))
    rooms: Rooms = {}
    *multiply, multiply_head = _in_order(
        [
            *(_bare(product, most.num_tokens, torch.bfloat16, rooms) for product in body),
            _bare(head, most.num_logits, torch.float32, rooms),
        ]
    )
    # Of the last layer only what comes before attention is needed of tokens whose logits are not wanted.
    whole, wanted = multiply[:-_PRODUCTS_AFTER_ATTENTION], [*multiply[-_PRODUCTS_AFTER_ATTENTION:], multiply_head]
    started = time.perf_counter()
    for shape in shapes:
        for product in whole:
            product(shape.num_tokens)
        if shape.num_logits:
            for product in wanted:
                product(shape.num_logits)
    return time.perf_counter() - started


def _body(model: Any, head: Any) -> Iterator[Any]:
    """Every matrix product of the layers, in order."""
    for module in model.modules():
        if isinstance(module, PackedLinear) and module is not head:
            yield module
        elif isinstance(module, FusedGatedMLP) and module.gated is not None:
            yield module.gated


Rooms = dict[tuple[str, int, int, torch.dtype], torch.Tensor]
"""Inputs and results [rows, features], the same for all products of a size: the engine's lie in the caches, too."""


class Product(NamedTuple):
    """One matrix product with its inputs and its result."""

    multiply: Callable[[int], object]
    """The first rows of the inputs; nothing is made in the call."""
    args: LinearArgs | None


def _in_order(products: list[Product]) -> list[Callable[[int], object]]:
    """Each fetches the first weights of the next at its end, as in the engine."""
    for before, after in pairwise(products):
        if before.args and after.args:
            before.args.next = ctypes.addressof(after.args)
    return [product.multiply for product in products]


def _bare(product: Any, room: int, out_dtype: torch.dtype, rooms: Rooms) -> Product:
    """A product of `room` rows at most."""

    def shared(name: str, features: int, dtype: torch.dtype) -> torch.Tensor:
        size = (name, room, features, dtype)
        if size not in rooms:
            rooms[size] = torch.randn(room, features).to(dtype)
        return rooms[size]

    kernel = product if isinstance(product, cpu.PackedLinear) else product.kernel
    if kernel is None:
        inputs = shared("x", product.in_features, torch.float32)
        return Product(lambda rows: product(inputs[:rows]), None)
    x, out = shared("x", kernel.in_features, torch.bfloat16), shared("out", kernel.out_features, out_dtype)
    args = kernel.prepared()
    args.x, args.x_stride = x.data_ptr(), x.stride(0)
    args.out, args.out_dtype, args.num_threads = out.data_ptr(), DTYPE_CODES[out_dtype], torch.get_num_threads()
    linear, reference = library().bg_linear, ctypes.byref(args)
    kept = (x, out)

    def multiply(rows: int) -> object:
        args.m = rows
        linear(reference)
        return kept

    return Product(multiply, args)


def copy_bandwidth() -> float:
    """Bytes per second of a large copy, those read and those written together."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8).fill_(1)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - start)
    return 2 * COPY_BYTES / best
