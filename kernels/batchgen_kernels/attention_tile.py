"""What the attention kernels do with one tile of queries.

Legend: M rows of a tile (query, head of the group), N keys of a tile, D head size (Dv of the values).
A score is x * factor with x = q . k and factor = scale / ln 2, or with softcap c: x = tanh(scale * q . k / c) and
factor = c / ln 2; in units of ln 2, since the hardware's exponential has base 2.
A partial result is (max, sum, out) of a row over some keys, out not yet divided by sum; (-inf, 0, 0) over none.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchgen_kernels.launch import jit, tl


@dataclass(frozen=True)
class AttentionConfig:
    """What a kernel is compiled for; its constexpr parameter `C`."""

    num_heads: int
    num_kv_heads: int
    block_size: int
    k_dim: int
    v_dim: int
    padded_k: int
    """k_dim padded to a power of two, at least 16 as tl.dot asks."""
    padded_v: int
    rows: int
    """Rows of a tile."""
    keys: int
    """Keys of a tile."""
    split: int
    """Tokens of a split; in a prompt chunk 0 for one pass over the context."""
    softcap: bool
    window: bool
    sinks: bool
    quantized: bool
    interpreted: bool
    """The interpreter's tl.dot needs fp32 operands."""

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads


@jit
def load_rows(ptr: tl.tensor, rows: tl.tensor, inside: tl.tensor, DIM: tl.constexpr, PADDED: tl.constexpr) -> tl.tensor:
    """Load a vector of DIM features, padded with zeros, for each of `rows`."""
    feature = tl.arange(0, PADDED)[None, :]
    mask = inside[:, None]
    if DIM != PADDED:
        mask = mask & (feature < DIM)
    return tl.load(ptr + rows[:, None] * DIM + feature, mask=mask, other=0.0)


@jit
def store_rows(ptr: tl.tensor, rows: tl.tensor, inside: tl.tensor, x: tl.tensor, C: tl.constexpr) -> None:
    """Store an output vector for each of `rows`."""
    feature = tl.arange(0, C.padded_v)[None, :]
    mask = inside[:, None] & (feature < C.v_dim)
    tl.store(ptr + rows[:, None] * C.v_dim + feature, x.to(ptr.dtype.element_ty), mask=mask)


@jit
def store_partial(
    out_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    rows: tl.tensor,
    inside: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    C: tl.constexpr,
) -> None:
    """Store the partial results of `rows`."""
    store_rows(out_ptr, rows, inside, out, C)
    tl.store(stats_ptr + rows * 2, top, mask=inside)
    tl.store(stats_ptr + rows * 2 + 1, total, mask=inside)


@jit
def merge(
    top: tl.tensor, total: tl.tensor, out: tl.tensor, top_2: tl.tensor, total_2: tl.tensor, out_2: tl.tensor
) -> tl.tensor:
    """Merge two partial results, the later keys second; a row may have seen no key."""
    new_top = tl.maximum(top, top_2)
    anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight = tl.exp2(top - anchor)
    weight_2 = tl.exp2(top_2 - anchor)
    total = tl.fma(total, weight, total_2 * weight_2)
    return new_top, total, tl.fma(out, weight[:, None], out_2 * weight_2[:, None])


@jit
def finish(
    sinks_ptr: tl.tensor,
    head: tl.tensor,
    inside: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    C: tl.constexpr,
) -> tl.tensor:
    """Divide by the sum, to which the head's sink is added first."""
    if C.sinks:
        sink = tl.load(sinks_ptr + head, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634
        new_top = tl.maximum(top, sink)
        weight = tl.exp2(top - new_top)
        total = tl.fma(total, weight, tl.exp2(sink - new_top))
        out = out * weight[:, None]
    # Rows that are no queries have seen no key.
    return tl.div_rn(out, tl.where(inside, total, 1.0)[:, None])


@jit
def nothing(C: tl.constexpr) -> tl.tensor:
    """Return the partial results of a tile over no keys."""
    top = tl.full((C.rows,), float("-inf"), tl.float32)
    return top, tl.zeros((C.rows,), tl.float32), tl.zeros((C.rows, C.padded_v), tl.float32)


@jit
def attend(
    q: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    position: tl.tensor,
    table_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scales_ptr: tl.tensor,
    v_scales_ptr: tl.tensor,
    kv_head: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    softcap_scale: tl.tensor,
    factor: tl.tensor,
    window: tl.tensor,
    MASKED: tl.constexpr,
    C: tl.constexpr,
) -> tl.tensor:
    """Extend a tile's partial results by the keys start..stop (start a multiple of C.keys) of one KV head.

    MASKED: some row may not see some of these keys, or they do not fill whole tiles.
    """
    for first in tl.range(start, stop, C.keys):
        key = first + tl.arange(0, C.keys)
        inside = key < stop
        block = tl.load(table_ptr + key // C.block_size, mask=inside, other=0).to(tl.int64)
        place = (block * C.num_kv_heads + kv_head) * C.block_size + key % C.block_size
        k = load_rows(k_ptr, place, inside, C.k_dim, C.padded_k)
        v = load_rows(v_ptr, place, inside, C.v_dim, C.padded_v)
        dtype: tl.constexpr = tl.float32 if C.interpreted else q.dtype
        scores = tl.dot(q.to(dtype), tl.trans(k.to(dtype)), input_precision="ieee")
        if C.quantized:
            scores *= tl.load(k_scales_ptr + place, mask=inside, other=0.0)[None, :]
        if C.softcap:
            # tanh(x) = (1 - exp(-2 x)) / (1 + exp(-2 x)), of |x| so that nothing overflows; 2 / ln 2 = 2.885.
            decay = tl.exp2(tl.abs(scores * softcap_scale) * -2.8853900817779268)
            tanh = (1.0 - decay) / (1.0 + decay)
            scores = tl.where(scores < 0, -tanh, tanh)
        if MASKED:
            seen = (key[None, :] <= position[:, None]) & inside[None, :]
            if C.window:
                seen = seen & (key[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1) * factor)
        # A row that has seen no key keeps -inf as its maximum; 0 instead makes its weights 0, not NaN.
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
        weights = tl.exp2(tl.fma(scores, factor, -anchor[:, None]))
        decay_M = tl.exp2(top - anchor)
        total = tl.fma(total, decay_M, tl.sum(weights, axis=1))
        top = new_top
        if C.quantized:
            weights *= tl.load(v_scales_ptr + place, mask=inside, other=0.0)[None, :]
        out = tl.dot(weights.to(dtype), v.to(dtype), out * decay_M[:, None], input_precision="ieee")
    return top, total, out


@jit
def attend_range(
    q: tl.tensor,
    position: tl.tensor,
    table_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scales_ptr: tl.tensor,
    v_scales_ptr: tl.tensor,
    kv_head: tl.tensor,
    start: tl.tensor,
    common: tl.tensor,
    stop: tl.tensor,
    softcap_scale: tl.tensor,
    factor: tl.tensor,
    window: tl.tensor,
    C: tl.constexpr,
) -> tl.tensor:
    """Attend to start..stop; all rows see the keys before `common`, in whole tiles, so these need no mask."""
    top, total, out = nothing(C)
    if not C.window:
        top, total, out = attend(
            q, top, total, out, position, table_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr,
            kv_head, start, common, softcap_scale, factor, window, False, C,
        )  # fmt: skip
        start = tl.maximum(start, common)
    return attend(
        q, top, total, out, position, table_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr,
        kv_head, start, stop, softcap_scale, factor, window, True, C,
    )  # fmt: skip
