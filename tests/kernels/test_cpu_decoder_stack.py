"""Decoder layers in one call have the bits of their kernels called one by one, at every level of the processor."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch
from batchgen_kernels import cpu
from torch import Tensor

pytestmark = pytest.mark.skipif(not cpu.is_available(), reason="the C++ kernels are not built")

E, HEADS, KV_HEADS, DIM, INNER = 96, 4, 2, 32, 80
BLOCK = 16


@pytest.fixture(params=cpu.levels() if cpu.is_available() else [])
def level(request: pytest.FixtureRequest) -> str:
    cpu.set_level(request.param)
    return str(request.param)


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


def chunks_of(ids: list[int], counts: list[int], lens: list[int], wanted: list[int]) -> cpu.TokenChunks:
    starts = [end - count for count, end in zip(counts, lens, strict=True)]
    return cpu.TokenChunks(*(array("i", column) for column in (ids, starts, counts, wanted)))


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


@pytest.mark.parametrize("int8", [False, True])
def test_a_whole_model_has_the_bits_of_its_parts(level: str, int8: bool) -> None:
    layers = [Parts(int8=int8), Parts(int8=int8)]
    embedding, norm, head = random(50, E), cpu.Norm(random(E), 1e-5), cpu.PackedLinear(random(70, E, scale=0.2))

    def angles_of(count: int) -> tuple[Tensor, Tensor]:
        x = torch.arange(count).unsqueeze(1) * torch.linspace(0.1, 1.0, DIM // 2).repeat(1, 2)
        return x.cos().bfloat16(), x.sin().bfloat16()

    model = cpu.DecoderModel(embedding, [parts.layer for parts in layers], norm, head, angles_of)
    stack = cpu.DecoderStack([parts.layer for parts in layers])
    cos, sin = angles_of(4000)
    for counts, lens, wanted in (
        ([1, 1, 1], [5, 17, 32], [0, 1, 2]),
        ([3, 1, 17], [9, 32, 20], [2, 3, 20]),
        ([3, 1, 17], [9, 32, 20], [20, 5, 5]),
        ([3, 1, 17], [9, 32, 20], [2, 3, 20, *range(21), *range(21)]),
        ([1, 1, 1], [5, 17, 32], [2, 0, 1]),
        ([4], [9], []),
    ):
        step = step_of(counts, lens)
        ids = torch.arange(sum(counts)) * 7 % 50
        positions = torch.cat([torch.arange(end - n, end) for n, end in zip(counts, lens, strict=True)])
        chunks = chunks_of(ids.tolist(), counts, lens, wanted)
        results = []
        for whole in (False, True):
            caches = []
            for seed, parts in enumerate(layers):
                torch.manual_seed(seed)
                caches.append(Caches())
                caches[-1].attach(parts.layer)
            if whole:
                logits = model(chunks, step[1])
            else:
                hidden = embedding[ids]
                stack(hidden, cos[positions], sin[positions], cpu.DecoderStep(*step))
                logits = head(cpu.rms_norm(hidden[wanted], *norm), out_dtype=torch.float32)
            results.append((logits, *(cache for each in caches for cache in (each.k, each.v))))
        for theirs, ours in zip(*results, strict=True):
            assert torch.equal(ours, theirs)


def test_a_model_goes_on_past_its_first_table_of_angles() -> None:
    made: list[int] = []

    def table(count: int) -> tuple[Tensor, Tensor]:
        made.append(count)
        x = torch.arange(count).unsqueeze(1) * torch.linspace(0.1, 1.0, DIM // 2).repeat(1, 2)
        return x.cos().bfloat16(), x.sin().bfloat16()

    parts, norm, head = Parts(), cpu.Norm(random(E), 1e-5), cpu.PackedLinear(random(70, E, scale=0.2))
    shape = (200, KV_HEADS, BLOCK, DIM)
    caches = (random(*shape), random(*shape))
    parts.layer.attach_cache(*caches)
    tables = torch.arange(200, dtype=torch.int32).view(1, 200)

    def logits(model: cpu.DecoderModel, position: int) -> Tensor:
        return model(chunks_of([3], [1], [position + 1], [0]), tables).clone()

    model = cpu.DecoderModel(random(50, E), [parts.layer], norm, head, table)
    before = logits(model, 1000)
    beyond = logits(model, 3000)
    assert made[1:] == [2 * 3001]
    assert torch.equal(logits(model, 1000), before)
    embedded = random(50, E)[3:4]
    cos, sin = table(3001)
    step = torch.tensor([187 * BLOCK + 8]), tables, torch.tensor([0, 1]).int(), torch.tensor([3001]).int()
    cpu.DecoderStack([parts.layer])(embedded, cos[3000:], sin[3000:], cpu.DecoderStep(*step))
    assert torch.equal(beyond, head(cpu.rms_norm(embedded, *norm), out_dtype=torch.float32))


def test_a_step_that_does_not_fit_is_refused() -> None:
    def table(count: int) -> tuple[Tensor, Tensor]:
        return angles(count, DIM, torch.bfloat16)

    parts, head = Parts(), cpu.PackedLinear(random(70, E))
    model = cpu.DecoderModel(random(50, E), [parts.layer], parts.norms[0], head, table)
    Caches().attach(parts.layer)
    tables = torch.zeros(1, 1, dtype=torch.int32)
    for token_id in (50, -1):
        with pytest.raises(IndexError, match="token ids must be from 0 to 49"):
            model(chunks_of([token_id], [1], [1], [0]), tables)
    with pytest.raises(IndexError, match="a position is negative"):
        model(chunks_of([0], [1], [0], [0]), tables)
    for counts, wanted in (([2], [0]), ([1], [1]), ([1], [-1]), ([-1], [0])):
        with pytest.raises(ValueError, match="counts must add up to 1 token ids, and wanted tokens be among them"):
            model(chunks_of([0], counts, [2], wanted), tables)
    with pytest.raises(ValueError, match="must be for the same sequences"):
        model(chunks_of([0, 0], [1, 1], [1, 1], []), tables)
    with pytest.raises(TypeError, match="must be arrays of int32"):
        model(chunks_of([0], [1], [1], [0])._replace(starts_S=array("q", [0])), tables)
    with pytest.raises(TypeError, match="block tables must be int32"):
        model(chunks_of([0], [1], [1], [0]), tables.long())
    with pytest.raises(ValueError, match="the head must have 96 features, got 80"):
        cpu.DecoderModel(random(50, E), [parts.layer], parts.norms[0], cpu.PackedLinear(random(70, INNER)), table)


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
