"""Arithmetic that the sampling kernels share; the twins in torch stand in `philox` and `sample`."""

from __future__ import annotations

from batchgen_kernels.launch import jit, tl


@jit
def logsumexp(x: tl.tensor) -> tl.tensor:
    """Log-sum-exp over the last of two axes; -inf where all terms are."""
    top = tl.max(x, axis=1)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(x - anchor[:, None]), axis=1)
    return tl.where(total > 0, tl.log(tl.where(total > 0, total, 1.0)) + anchor, float("-inf"))


@jit
def load_groups(row_ptr: tl.tensor, num_groups: tl.tensor, BLOCK_G: tl.constexpr) -> tl.tensor:
    """Load what a row has of each group: its sum, or its best score; -inf past the last group."""
    group = tl.arange(0, BLOCK_G)
    return tl.load(row_ptr + group, mask=group < num_groups, other=float("-inf"))


@jit
def is_finite(top: tl.tensor) -> tl.tensor:
    """Whether a row can be drawn from, by its best score: -inf where all is masked, +inf where one is not finite."""
    return (top > float("-inf")) & (top < float("inf"))


@jit
def row_logsumexp(sums_ptr: tl.tensor, num_groups: tl.tensor, BLOCK_G: tl.constexpr) -> tl.tensor:
    """Log-sum-exp of a row from those of its groups; 0 where no group's is finite."""
    sums = load_groups(sums_ptr, num_groups, BLOCK_G)
    anchor = tl.max(sums, axis=0)
    anchor = tl.where(anchor == float("-inf"), 0.0, anchor)
    total = tl.sum(tl.exp(sums - anchor), axis=0)
    return tl.log(tl.where(total > 0, total, 1.0)) + anchor


@jit
def key_of(x: tl.tensor) -> tl.tensor:
    """Map fp32 to int32 in the same order; -0 counts as 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@jit
def score_of(key: tl.tensor) -> tl.tensor:
    """Undo `key_of`."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@jit
def drop(y: tl.tensor, token: tl.tensor, lowest: tl.tensor, tie: tl.tensor, last: tl.tensor) -> tl.tensor:
    """Replace y by -inf for keys below `lowest`, and for ids past `last` among those whose key is `tie`."""
    key = key_of(y)
    kept = (key >= lowest) & ((key != tie) | (token <= last))
    return tl.where(kept, y, float("-inf"))


@jit
def random_bits(key_ptr: tl.tensor, draw: tl.tensor) -> tl.tensor:
    """Return the noise words of some draws under one row of keys_R5, as `batchgen_kernels.philox` defines them."""
    seed = tl.load(key_ptr)
    source = tl.load(key_ptr + 1).to(tl.uint32)
    row = tl.load(key_ptr + 2)
    sample = tl.load(key_ptr + 3).to(tl.uint32)
    position = tl.load(key_ptr + 4).to(tl.uint32)
    row_low = (row & 0xFFFFFFFF).to(tl.uint32)
    row_high = (row >> 32).to(tl.uint32)
    id_0, id_1, id_2, id_3 = tl.philox(seed, row_low, row_high, source, sample)
    stream = id_0.to(tl.uint64) | (id_1.to(tl.uint64) << 32)
    draw = draw.to(tl.uint32)
    zero = draw & 0
    word_0, word_1, word_2, word_3 = tl.philox(stream, draw >> 2, zero + position, zero + id_2, zero + id_3)
    lane = draw & 3
    return tl.where(lane < 2, tl.where(lane == 0, word_0, word_1), tl.where(lane == 2, word_2, word_3))


@jit
def gumbel(bits: tl.tensor) -> tl.tensor:
    """Turn words into Gumbel noise, as `batchgen_kernels.philox.gumbel`."""
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)
    series = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * 0.25)))
    return -tl.log(tl.where(u < 0.015625, series, -tl.log(1.0 - u)))
