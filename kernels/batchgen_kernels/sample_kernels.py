"""The Triton kernels of sample: edits of the logits, sums over groups, draw. Nothing waits for the host.

Legend: V vocabulary, G groups of GROUP tokens, N entries of a list of edits, y = edited logits / temperature.
"""

from __future__ import annotations

from batchgen_kernels.launch import jit, tl
from batchgen_kernels.sample_math import drop, gumbel, is_finite, load_groups, logsumexp, random_bits, row_logsumexp


@jit
def bias_kernel(
    edited_ptr: tl.tensor,
    row_ptr: tl.tensor,
    token_ptr: tl.tensor,
    value_ptr: tl.tensor,
    vocabulary: int,
    num_entries: int,
    BLOCK_N: tl.constexpr,
) -> None:
    """Add BLOCK_N entries to the logits in place."""
    entry = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.load(row_ptr + entry, mask=entry < num_entries, other=-1)
    held = row >= 0
    place = edited_ptr + row * vocabulary + tl.load(token_ptr + entry, mask=held, other=0)
    value = tl.load(value_ptr + entry, mask=held, other=0.0).to(tl.float32)
    tl.store(place, tl.load(place, mask=held, other=0.0) + value, mask=held)


@jit
def penalty_kernel(
    edited_ptr: tl.tensor,
    row_ptr: tl.tensor,
    token_ptr: tl.tensor,
    count_ptr: tl.tensor,
    repetition_ptr: tl.tensor,
    presence_ptr: tl.tensor,
    frequency_ptr: tl.tensor,
    vocabulary: int,
    num_entries: int,
    REPETITION: tl.constexpr,
    PRESENCE: tl.constexpr,
    FREQUENCY: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Penalise BLOCK_N (row, token) entries in place: repetition, frequency, presence."""
    entry = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.load(row_ptr + entry, mask=entry < num_entries, other=-1)
    held = row >= 0
    place = edited_ptr + row * vocabulary + tl.load(token_ptr + entry, mask=held, other=0)
    count = tl.load(count_ptr + entry, mask=held, other=0)
    x = tl.load(place, mask=held, other=0.0)
    if REPETITION:
        penalty = tl.load(repetition_ptr + row, mask=held, other=1.0)
        x = tl.where(x > 0, tl.div_rn(x, penalty), x * penalty)
    if FREQUENCY:
        x = x - tl.load(frequency_ptr + row, mask=held, other=0.0) * count.to(tl.float32)
    if PRESENCE:
        x = x - tl.where(count > 0, tl.load(presence_ptr + row, mask=held, other=0.0), 0.0)
    tl.store(place, x, mask=held)


@jit
def group_kernel(
    logits_ptr: tl.tensor,
    edited_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    raw_sums_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    best_ptr: tl.tensor,
    vocabulary: int,
    num_groups: int,
    logits_stride: int,
    edited_stride: int,
    SAME: tl.constexpr,
    APART: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
) -> None:
    """Of BLOCK_G groups: the log-sum-exp of raw logits and (if APART) of y, the best edited logit and its id.

    SAME: there are no edits. APART: the sums of y are kept apart from those of the raw logits.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = token < vocabulary
    place = row * num_groups + group
    raw = tl.load(logits_ptr + row * logits_stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    # Rows with NaN or +inf are reported; left out of the sums they make no NaN on the way.
    raw_sums = logsumexp(tl.where(raw < float("inf"), raw, float("-inf")))
    tl.store(raw_sums_ptr + place, raw_sums, mask=group < num_groups)
    x = raw
    if not SAME:
        x = tl.load(edited_ptr + row * edited_stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    finite = tl.where(x < float("inf"), x, float("-inf"))
    top = tl.max(finite, axis=1)
    first = tl.min(tl.where(finite == top[:, None], token, vocabulary), axis=1)
    spoiled = tl.sum((inside & ~(x < float("inf"))).to(tl.int32), axis=1) > 0
    tl.store(tops_ptr + place, tl.where(spoiled, float("inf"), top), mask=group < num_groups)
    tl.store(best_ptr + place, tl.minimum(first, vocabulary - 1), mask=group < num_groups)
    if TEMPERATURE:
        temperature = tl.maximum(tl.load(temperature_ptr + row), 1e-30)
        finite = tl.div_rn(finite, temperature)
    if APART:
        sums = raw_sums
        if (not SAME) or TEMPERATURE:
            sums = logsumexp(finite)
        tl.store(sums_ptr + place, sums, mask=group < num_groups)


@jit
def draw_kernel(
    logits_ptr: tl.tensor,
    edited_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    raw_sums_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    best_ptr: tl.tensor,
    limits_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    logprobs_ptr: tl.tensor,
    ok_ptr: tl.tensor,
    vocabulary: int,
    num_groups: int,
    logits_stride: int,
    edited_stride: int,
    GREEDY: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    TOP_K: tl.constexpr,
    FILTERS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
) -> None:
    """Draw one row's token: its best one, or by Gumbel noise first a group, then a token of the group."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_G)
    tops = load_groups(tops_ptr + row * num_groups, num_groups, BLOCK_G)
    top = tl.max(tops, axis=0)
    ok = is_finite(top)
    best_group = tl.min(tl.where(tops == top, group, num_groups), axis=0)
    token_id = tl.load(best_ptr + row * num_groups + tl.minimum(best_group, num_groups - 1))
    if not GREEDY:
        drawn = ok
        temperature = 1.0
        if TEMPERATURE:
            temperature = tl.load(temperature_ptr + row)
            drawn = drawn & (temperature != 0.0)
            temperature = tl.maximum(temperature, 1e-30)
        if TOP_K:
            drawn = drawn & (tl.load(top_k_ptr + row) != 1)
        if drawn:
            sums = load_groups(sums_ptr + row * num_groups, num_groups, BLOCK_G)
            # Draws of groups begin at 2^31.
            scores = sums + gumbel(random_bits(keys_ptr + row * 5, group.to(tl.uint32) + 0x80000000))
            chosen = tl.argmax(tl.where(group < num_groups, scores, float("-inf")), axis=0)
            token = chosen * GROUP + tl.arange(0, GROUP)
            y = tl.load(edited_ptr + row * edited_stride + token, mask=token < vocabulary, other=float("-inf"))
            y = tl.div_rn(y.to(tl.float32), temperature)
            if FILTERS:
                limits = limits_ptr + row * 3
                y = drop(y, token, tl.load(limits), tl.load(limits + 1), tl.load(limits + 2))
            token_id = chosen * GROUP + tl.argmax(y + gumbel(random_bits(keys_ptr + row * 5, token)), axis=0)
    token_id = tl.where(ok, token_id, 0)
    logsum = row_logsumexp(raw_sums_ptr + row * num_groups, num_groups, BLOCK_G)
    logprob = tl.load(logits_ptr + row * logits_stride + token_id).to(tl.float32) - logsum
    tl.store(token_ids_ptr + row, token_id.to(tl.int64))
    tl.store(logprobs_ptr + row, tl.where(ok, logprob, 0.0))
    tl.store(ok_ptr + row, ok)
