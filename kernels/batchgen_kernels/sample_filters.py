"""The Triton kernel of sample that finds what top-k, top-p and min-p keep of each row.

Legend: V vocabulary, G groups of GROUP tokens, y = edited logits / temperature.
A score's key is an integer that orders as the score does, so that a threshold is found by halving an interval of keys:
exact, also among equal scores, and without a sort. A pass skips the tiles whose best score lies below the interval.
"""

from __future__ import annotations

from batchgen_kernels.launch import jit, tl
from batchgen_kernels.sample_math import drop, is_finite, key_of, load_groups, logsumexp, score_of


@jit
def _load_y(row_ptr: tl.tensor, token: tl.tensor, vocabulary: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Load y of some tokens of a row; -inf past the vocabulary."""
    x = tl.load(row_ptr + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    return tl.div_rn(x, temperature)


@jit
def _tile_top(
    tops_ptr: tl.tensor, first_group: tl.tensor, num_groups: tl.tensor, temperature: tl.tensor, GROUPS: tl.constexpr
) -> tl.tensor:
    """Return the key of the best y of a tile."""
    group = first_group + tl.arange(0, GROUPS)
    tops = tl.load(tops_ptr + group, mask=group < num_groups, other=float("-inf"))
    return key_of(tl.div_rn(tl.max(tops, axis=0), temperature))


@jit
def _divide(
    row_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    low: tl.tensor,
    pivot: tl.tensor,
    top: tl.tensor,
    temperature: tl.tensor,
    vocabulary: tl.tensor,
    num_groups: tl.tensor,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
) -> tl.tensor:
    """Count the tokens with keys from `pivot` on and sum their mass, exp(y - top); look at no tile all below `low`.

    Returns (count, mass, lowest key from the pivot on, highest key below the pivot).
    """
    counts = tl.zeros((GROUP * GROUPS,), tl.int32)
    masses = tl.zeros((GROUP * GROUPS,), tl.float32)
    lowest = tl.full((GROUP * GROUPS,), 0x7FFFFFFF, tl.int32)
    highest = tl.full((GROUP * GROUPS,), -0x7FFFFFFF, tl.int32)
    for first in range(0, num_groups, GROUPS):
        if _tile_top(tops_ptr, first, num_groups, temperature, GROUPS) >= low:
            token = first * GROUP + tl.arange(0, GROUP * GROUPS)
            y = _load_y(row_ptr, token, vocabulary, temperature)
            key = key_of(y)
            above = (key >= pivot) & (token < vocabulary)
            counts += above.to(tl.int32)
            masses += tl.where(above, tl.exp(y - top), 0.0)
            lowest = tl.where(above, tl.minimum(lowest, key), lowest)
            highest = tl.where(key < pivot, tl.maximum(highest, key), highest)
    return tl.sum(counts, axis=0), tl.sum(masses, axis=0), tl.min(lowest, axis=0), tl.max(highest, axis=0)


@jit
def _search(
    row_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    low: tl.tensor,
    count_low: tl.tensor,
    mass_low: tl.tensor,
    top: tl.tensor,
    wanted_count: tl.tensor,
    wanted_mass: tl.tensor,
    temperature: tl.tensor,
    vocabulary: tl.tensor,
    num_groups: tl.tensor,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
) -> tl.tensor:
    """Find the highest key from which on there are `wanted_count` tokens and `wanted_mass`; from `low` on there are.

    Returns (key, count and mass from the key on, count and mass above it). Where one token decides, the key may be any
    above the next lower token's. Each step leaves half of the interval and draws its ends in to keys that exist.
    """
    high = key_of(top) + 1
    count_high = 0
    mass_high = 0.0
    while (low + 1 < high) & (count_low - count_high > 1):
        # The mean without overflow, rounded up: above `low`.
        pivot = (low | (high - 1)) - ((low ^ (high - 1)) >> 1)
        count, mass, lowest, highest = _divide(
            row_ptr, tops_ptr, low, pivot, top, temperature, vocabulary, num_groups, GROUP, GROUPS
        )
        enough = (count >= wanted_count) & (mass >= wanted_mass)
        low = tl.where(enough, lowest, low)
        count_low = tl.where(enough, count, count_low)
        mass_low = tl.where(enough, mass, mass_low)
        high = tl.where(enough, high, tl.maximum(highest, low) + 1)
        count_high = tl.where(enough, count_high, count)
        mass_high = tl.where(enough, mass_high, mass)
    return low, count_low, mass_low, count_high, mass_high


@jit
def _last_kept(
    row_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    key: tl.tensor,
    wanted: tl.tensor,
    temperature: tl.tensor,
    vocabulary: tl.tensor,
    num_groups: tl.tensor,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
) -> tl.tensor:
    """Return the id of the `wanted`-th token, counted from id 0, whose key is `key`."""
    seen = 0
    last = -1
    for first in range(0, num_groups, GROUPS):
        if (seen < wanted) & (_tile_top(tops_ptr, first, num_groups, temperature, GROUPS) >= key):
            token = first * GROUP + tl.arange(0, GROUP * GROUPS)
            equal = key_of(_load_y(row_ptr, token, vocabulary, temperature)) == key
            rank = seen + tl.cumsum(equal.to(tl.int32), axis=0)
            last = tl.maximum(last, tl.max(tl.where(equal & (rank <= wanted), token, -1), axis=0))
            seen += tl.sum(equal.to(tl.int32), axis=0)
    return last


@jit
def filter_kernel(
    edited_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    limits_ptr: tl.tensor,
    vocabulary: int,
    num_groups: int,
    edited_stride: int,
    TEMPERATURE: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
) -> None:
    """Find a row's limits (lowest key kept, key of a cut among equals, last id kept of these); redo its group sums."""
    row = tl.program_id(0).to(tl.int64)
    limits_ptr += row * 3
    tops_ptr += row * num_groups
    sums_ptr += row * num_groups
    row_ptr = edited_ptr + row * edited_stride
    temperature = 1.0
    if TEMPERATURE:
        temperature = tl.maximum(tl.load(temperature_ptr + row), 1e-30)
    top_k = vocabulary
    if TOP_K:
        top_k = tl.load(top_k_ptr + row).to(tl.int32)
        top_k = tl.where((top_k <= 0) | (top_k > vocabulary), vocabulary, top_k)
    top = tl.max(load_groups(tops_ptr, num_groups, BLOCK_G), axis=0)
    usable = is_finite(top)
    top = tl.div_rn(tl.where(usable, top, 0.0), temperature)
    sums = load_groups(sums_ptr, num_groups, BLOCK_G)
    mass = tl.sum(tl.exp(tl.where(usable, sums - top, float("-inf"))), axis=0)
    low = key_of(tl.full((), float("-inf"), tl.float32))
    count = vocabulary
    tie = low
    last = vocabulary
    if TOP_K:  # noqa: SIM102 (this one is decided when the kernel is compiled)
        if usable & (top_k < vocabulary) & (top_k > 1):
            low, count, mass, _, _ = _search(
                row_ptr, tops_ptr, low, count, mass, top, top_k, 0.0, temperature, vocabulary, num_groups, GROUP, GROUPS
            )
    if TOP_P:
        top_p = tl.load(top_p_ptr + row)
        if usable & (top_p < 1.0):
            wanted = top_p * mass
            low, count, _, count_high, mass_high = _search(
                row_ptr, tops_ptr, low, count, mass, top, 1, wanted, temperature, vocabulary, num_groups, GROUP, GROUPS
            )
            if count - count_high > 1:
                tie = low
                kept = tl.ceil((wanted - mass_high) / tl.exp(score_of(low) - top)).to(tl.int32)
                kept = tl.minimum(tl.maximum(kept, 1), count - count_high)
                last = _last_kept(row_ptr, tops_ptr, low, kept, temperature, vocabulary, num_groups, GROUP, GROUPS)
    if MIN_P:
        min_p = tl.load(min_p_ptr + row)
        if usable & (min_p > 0.0):
            low = tl.maximum(low, key_of(top + tl.log(min_p)))
    tl.store(limits_ptr, low)
    tl.store(limits_ptr + 1, tie)
    tl.store(limits_ptr + 2, last)
    if usable & (low > key_of(tl.full((), float("-inf"), tl.float32))):
        for first in range(0, num_groups, GROUPS):
            group = first + tl.arange(0, GROUPS)
            token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            y = drop(_load_y(row_ptr, token, vocabulary, temperature), token, low, tie, last)
            tl.store(sums_ptr + group, logsumexp(y), mask=group < num_groups)
