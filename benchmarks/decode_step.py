"""One decode step of a Llama-shaped model with random weights, made of this project's kernels: graph against eager.

Legend: S sequences (one token each), H query heads, K KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from batchgen_kernels.attention_plan import (
    SPLIT_TOKENS,
    AttentionPlan,
    plan_attention,
    reserve_plan,
    tile_shape,
    update_plan,
)
from batchgen_kernels.paged_attention import paged_attention
from batchgen_kernels.rms_norm import rms_norm
from batchgen_kernels.rotary import rotary
from batchgen_kernels.sample import SampleParams, sample
from batchgen_kernels.silu_mul import silu_mul
from batchgen_kernels.store_kv import store_kv
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.gpu_sizes import Sizes
from benchmarks.kernel_cases import BLOCK_SIZE, ModelShape
from benchmarks.kernels_gpu import Batch, measure_rates, seconds


class Layer(NamedTuple):
    """Weights [out, in] and caches of one layer."""

    qkv: Tensor
    attention_out: Tensor
    gate_up: Tensor
    down: Tensor
    norms: Tensor
    k_cache: Tensor
    v_cache: Tensor


class DecodeStep:
    """A step over S sequences whose inputs are static tensors, so that a CUDA graph can hold it.

    Contexts grow by one token a step, up to `max_context`; block tables are made once, with room for all of it.
    """

    def __init__(self, model: ModelShape, num_layers: int, contexts: list[int], max_context: int, device: torch.device):
        self.model, self.device = model, device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        random = partial(torch.randn, device=device, dtype=dtype)
        batch = Batch([max_context] * len(contexts), [1] * len(contexts))
        cache = (batch.num_blocks, model.kv_heads, BLOCK_SIZE)
        widths = (model.heads * model.k_dim, model.kv_heads * model.k_dim, model.kv_heads * model.v_dim)

        def weight(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, device=device, dtype=dtype).mul_(columns**-0.5)

        self.widths = widths
        self.layers = [
            Layer(
                qkv=weight(sum(widths), model.features),
                attention_out=weight(model.features, model.heads * model.v_dim),
                gate_up=weight(2 * model.inner, model.features),
                down=weight(model.features, model.inner),
                norms=torch.ones(2, model.features, device=device, dtype=dtype),
                k_cache=random(*cache, model.k_dim),
                v_cache=random(*cache, model.v_dim),
            )
            for _ in range(num_layers)
        ]
        self.embedding = weight(model.vocabulary, model.features)
        self.norm = torch.ones(model.features, device=device, dtype=dtype)
        angles = torch.rand(max_context, model.k_dim, device=device) * 6
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        self.tables = batch.tables(device)
        self.starts = torch.arange(len(contexts) + 1, device=device, dtype=torch.int32)
        self.tokens = torch.zeros(len(contexts), device=device, dtype=torch.int64)
        self.contexts = torch.zeros(len(contexts), device=device, dtype=torch.int32)
        self.keys = torch.zeros(len(contexts), 5, device=device, dtype=torch.int64)
        shape = tile_shape(model.heads, model.kv_heads, max(model.k_dim, model.v_dim))
        num_splits = len(contexts) * (max_context // SPLIT_TOKENS + 1)
        self.plan: AttentionPlan = reserve_plan(
            shape, num_sequences=len(contexts), num_splits=num_splits, device=device
        )
        self.begin(contexts)

    def begin(self, contexts: list[int]) -> None:
        """Set the contexts, the step's own token among them, and plan the step; in place."""
        self.contexts.copy_(torch.tensor(contexts))
        update_plan(self.plan, plan_attention(list(range(len(contexts) + 1)), contexts, self.plan.shape))

    def run(self) -> Tensor:
        """Compute the step; returns the drawn (greedy) token ids [S], which are the next step's inputs."""
        position = self.contexts.long() - 1
        block = self.tables.gather(1, (position // BLOCK_SIZE)[:, None]).squeeze(1).long()
        slots = block * BLOCK_SIZE + position % BLOCK_SIZE
        cos, sin = self.cos[position], self.sin[position]
        hidden = self.embedding[self.tokens]
        delta = torch.zeros_like(hidden)
        for layer in self.layers:
            x, hidden = rms_norm(delta, layer.norms[0], 1e-5, hidden)
            delta = linear(self._attend(layer, x, cos, sin, slots), layer.attention_out)
            x, hidden = rms_norm(delta, layer.norms[1], 1e-5, hidden)
            delta = linear(silu_mul(linear(x, layer.gate_up)), layer.down)
        x, _ = rms_norm(delta, self.norm, 1e-5, hidden)
        logits = linear(x, self.embedding)
        self.tokens.copy_(sample(logits, SampleParams(all_greedy=True), self.keys).token_ids_R)
        return self.tokens

    def _attend(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor) -> Tensor:
        parts = torch.split(linear(x, layer.qkv), list(self.widths), dim=1)
        sizes = (self.model.k_dim, self.model.k_dim, self.model.v_dim)
        q, k, v = (torch.unflatten(part, 1, (-1, size)) for part, size in zip(parts, sizes, strict=True))
        q, k = rotary(q, k, cos, sin)
        store_kv(k, v, layer.k_cache, layer.v_cache, slots)
        out = paged_attention(
            q, layer.k_cache, layer.v_cache, self.tables, self.starts, self.contexts,
            scale=self.model.k_dim**-0.5, plan=self.plan,
        )  # fmt: skip
        return out.flatten(1)

    def weight_bytes(self) -> int:
        """Bytes of all weights that a step reads; of the embedding the output head."""
        weights = [weight for layer in self.layers for weight in layer[:5]]
        return sum(weight.nbytes for weight in (*weights, self.embedding))

    def cache_bytes(self) -> int:
        """Bytes of keys and values that a step reads."""
        return sum(layer.k_cache[0].nbytes + layer.v_cache[0].nbytes for layer in self.layers) * int(
            self.contexts.sum()
        ) // BLOCK_SIZE  # fmt: skip

    def operations(self) -> int:
        """Operations of the matrix products."""
        weights = [weight for layer in self.layers for weight in layer[:4]]
        return 2 * len(self.tokens) * sum(weight.numel() for weight in (*weights, self.embedding))


def measure_decode_step(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Capture a step as a CUDA graph, compare replays with eager steps, and time the graph beside its floor.

    The floor is the larger of weights over copy bandwidth and operations over matrix rate, plus keys and values over
    copy bandwidth. Contexts as halfway through in and out lengths that are uniform: 100 to 1,600 tokens for a GPU.
    """
    rates = measure_rates(device, sizes)
    shortest, longest = sizes.lengths[0], sizes.lengths[1] * 25 // 16
    contexts = torch.linspace(shortest, longest, sizes.num_rows).long().tolist()
    step = DecodeStep(sizes.model, sizes.num_layers, contexts, longest + 64, device)
    replay = capture(step)
    same = all(replay_equals_eager(step, replay, [length + n for length in contexts]) for n in range(3))
    taken = seconds(step.run, device)
    floor = max(step.weight_bytes() / rates.copy, step.operations() / rates.matrix) + step.cache_bytes() / rates.copy
    shape = f"{sizes.model.name}, {sizes.num_layers} layers, {sizes.num_rows} sequences"
    return {"shape": shape, "seconds": taken, "floor_seconds": floor, "share_of_floor": floor / taken, "ok": same}


def capture(step: DecodeStep) -> Callable[[], object]:
    """Capture a step; one eager run goes before, in which kernels are compiled and libraries choose theirs.

    On a processor, in a dry run, there is nothing to capture, and the step itself is run again.
    """
    step.run()
    if step.device.type != "cuda":
        return step.run
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    replay: Callable[[], object] = graph.replay
    return replay


def replay_equals_eager(step: DecodeStep, replay: Callable[[], object], contexts: list[int]) -> bool:
    """Whether both draw the same tokens from the same inputs, the caches after the one being those of the other."""
    step.begin(contexts)
    before = step.tokens.clone()
    eager = step.run().clone()
    step.tokens.copy_(before)
    replay()
    return torch.equal(step.tokens, eager)
