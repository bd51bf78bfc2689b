"""Decoder layers in one call have the bits of their kernels called one by one, at every level of the processor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from batchgen_kernels import cpu
from torch import Tensor

pytestmark = pytest.mark.skipif(not cpu.is_available(), reason="the C++ kernels are not built")

E, HEADS, KV_HEADS, DIM, INNER = 96, 4, 2, 32, 80
BLOCK = 16


@pytest.fixture(params=cpu.levels() if cpu.is_available() else [])
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    cpu.set_level(request.param)
    yield request.param
    cpu.set_level(cpu.levels()[-1])


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).bfloat16()


class Parts:
    """The kernels one by one, and the layer made of them."""

    def __init__(self, *, int8: bool = False, bias: bool = False, norm_dtype: torch.dtype = torch.bfloat16) -> None:
        width = (HEADS + 2 * KV_HEADS) * DIM
        self.qkv = cpu.PackedLinear(random(width, E, scale=0.2), random(width) if bias else None, int8=int8)
        self.out = cpu.PackedLinear(random(E, HEADS * DIM, scale=0.2), int8=int8)
        self.gate_up = cpu.PackedGatedLinear(random(INNER, E, scale=0.2), random(INNER, E, scale=0.3), int8=int8)
        self.down = cpu.PackedLinear(random(E, INNER, scale=0.2), int8=int8)
        self.norms = (cpu.Norm(random(E).to(norm_dtype), 1e-5), cpu.Norm((random(E) + 1).to(norm_dtype), 1e-6))
        self.layer = cpu.DecoderLayer(
            self.qkv,
            self.out,
            self.gate_up,
            self.down,
            self.norms,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            scale=DIM**-0.5,
        )

    def one_by_one(self, hidden: Tensor, cos: Tensor, sin: Tensor, step: tuple[Tensor, ...], caches: Caches) -> Tensor:
        slots, tables, starts, lens = step
        (first, first_eps), (second, second_eps) = self.norms
        states = self.qkv(cpu.rms_norm(hidden, first, first_eps)).unflatten(1, (-1, DIM))
        q, k, v = states.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        q, k = cpu.rotary(q, k, cos, sin)
        cpu.store_kv(k, v, caches.k, caches.v, slots, caches.k_scales, caches.v_scales)
        attended = cpu.paged_attention(
            q, caches.k, caches.v, tables, starts, lens, scale=DIM**-0.5, window=caches.window,
            k_scales=caches.k_scales, v_scales=caches.v_scales,
        )  # fmt: skip
        normed, summed = cpu.rms_norm(self.out(attended.flatten(1)), second, second_eps, hidden)
        return summed + self.down(self.gate_up(normed))


class Caches:
    """Keys and values of eight blocks, with some content."""

    def __init__(self, *, int8: bool = False, window: int | None = None) -> None:
        shape = (8, KV_HEADS, BLOCK, DIM)
        self.window = window
        self.k, self.v = (random(*shape), random(*shape)) if not int8 else (None, None)  # type: ignore[assignment]
        self.k_scales = self.v_scales = None
        if int8:
            self.k, self.v = (torch.randint(-127, 128, shape, dtype=torch.int8) for _ in range(2))
            self.k_scales, self.v_scales = torch.rand(shape[:3]) / 100, torch.rand(shape[:3]) / 100

    def attach(self, layer: cpu.DecoderLayer) -> None:
        layer.attach_cache(self.k, self.v, self.window, self.k_scales, self.v_scales)


def step_of(counts: list[int], lens: list[int]) -> tuple[Tensor, ...]:
    """Sequences with `counts` new tokens that end at `lens`, two blocks each."""
    tables = torch.arange(2 * len(counts), dtype=torch.int32).view(-1, 2).flip(0)
    slots = [
        int(tables[index, position // BLOCK]) * BLOCK + position % BLOCK
        for index, (count, end) in enumerate(zip(counts, lens, strict=True))
        for position in range(end - count, end)
    ]
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return torch.tensor(slots), tables.contiguous(), starts, torch.tensor(lens, dtype=torch.int32)


def angles(count: int, rotated: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = torch.linspace(0, 3, count * rotated // 2).view(count, -1).repeat(1, 2)
    return x.cos().to(dtype), x.sin().to(dtype)


@pytest.mark.parametrize(
    ("weights", "cache"),
    [
        ({}, {}),
        ({"bias": True, "norm_dtype": torch.float32}, {"window": 7}),
        ({"int8": True}, {"int8": True}),
    ],
    ids=["plain", "bias-window", "int8"],
)
@pytest.mark.parametrize("rotated", [DIM, DIM // 2])
def test_one_call_has_the_bits_of_many(level: str, weights: Any, cache: Any, rotated: int) -> None:
    layers, caches = [Parts(**weights), Parts(**weights)], []
    for _ in range(2):
        torch.manual_seed(0)
        caches.append([Caches(**cache), Caches(**cache)])
    stack = cpu.DecoderStack([parts.layer for parts in layers])
    for parts, attached in zip(layers, caches[1], strict=True):
        attached.attach(parts.layer)
    for counts, lens in (([1], [5]), ([3, 1, 17], [9, 32, 20]), ([1, 1, 1, 1], [30, 2, 31, 16])):
        step, (cos, sin) = step_of(counts, lens), angles(sum(counts), rotated, torch.bfloat16)
        expected = hidden = random(sum(counts), E)
        for parts, own in zip(layers, caches[0], strict=True):
            expected = parts.one_by_one(expected.clone(), cos, sin, step, own)
        stack(hidden, cos, sin, cpu.DecoderStep(*step))
        assert torch.equal(hidden, expected)
    for theirs, ours in zip(*caches, strict=True):
        assert torch.equal(ours.k, theirs.k)
        assert torch.equal(ours.v, theirs.v)


def test_what_does_not_fit_is_refused() -> None:
    parts, step, (cos, sin) = Parts(), cpu.DecoderStep(*step_of([2], [2])), angles(2, DIM, torch.float32)
    with pytest.raises(ValueError, match=r"a cache must be contiguous \[N, 2, B, 32\]"):
        parts.layer.attach_cache(random(4, 3, BLOCK, DIM), random(4, 3, BLOCK, DIM))
    with pytest.raises(ValueError, match="belong to int8 caches"):
        parts.layer.attach_cache(*(torch.zeros(4, KV_HEADS, BLOCK, DIM, dtype=torch.int8) for _ in range(2)))
    Caches().attach(parts.layer)
    stack = cpu.DecoderStack([parts.layer])
    with pytest.raises(ValueError, match=r"hidden must be contiguous \[2, 96\]"):
        stack(random(3, E), cos, sin, step)
    with pytest.raises(TypeError, match="hidden must be"):
        stack(random(2, E).float(), cos, sin, step)
    with pytest.raises(ValueError, match="cos and sin must agree"):
        stack(random(2, E), cos, sin[:1], step)
    with pytest.raises(ValueError, match="down must have 80 features, got 96"):
        cpu.DecoderLayer(
            parts.qkv, parts.out, parts.gate_up, cpu.PackedLinear(random(E, E)), parts.norms,
            num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, scale=1.0,
        )  # fmt: skip
    with pytest.raises(TypeError, match="step tensors must be contiguous"):
        cpu.DecoderStep(*(tensor.float() for tensor in step_of([1], [1])))
