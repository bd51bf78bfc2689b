"""The Triton kernels of paged_attention; `batchgen_kernels.attention_plan` says what their items are.

A tile's rows are (query, query head) pairs that share a KV head; `batchgen_kernels.attention_tile` has the formulas.
"""

from __future__ import annotations

from batchgen_kernels.attention_tile import (
    attend,
    attend_range,
    finish,
    load_rows,
    merge,
    nothing,
    store_partial,
    store_rows,
)
from batchgen_kernels.launch import jit, tl


@jit
def decode_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scales_ptr: tl.tensor,
    v_scales_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    contexts_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partial_out_ptr: tl.tensor,
    partial_stats_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    slot_starts_ptr: tl.tensor,
    items_ptr: tl.tensor,
    table_width: int,
    softcap_scale: float,
    factor: float,
    window: int,
    C: tl.constexpr,
) -> None:
    """Decodes: a fixed number of programs walks over all (item, KV head); a sequence of one split is finished here."""
    for work in range(tl.program_id(0), tl.load(counts_ptr) * C.num_kv_heads, tl.num_programs(0)):
        kv_head = work % C.num_kv_heads
        item = work // C.num_kv_heads
        sequence = tl.load(items_ptr + item * 2).to(tl.int64)
        split = tl.load(items_ptr + item * 2 + 1)
        context = tl.load(contexts_ptr + sequence)
        start = split * C.split
        stop = tl.minimum(start + C.split, context)
        first_split = 0
        if C.window:
            oldest = tl.maximum(context - window, 0)
            first_split = oldest // C.split
            start = tl.maximum(start, oldest // C.keys * C.keys)
        if split >= first_split:
            row = tl.arange(0, C.rows)
            inside = row < C.group
            head = kv_head * C.group + row
            query = tl.load(query_starts_ptr + sequence).to(tl.int64) * C.num_heads + head
            q = load_rows(q_ptr, query, inside, C.k_dim, C.padded_k)
            top, total, out = nothing(C)
            top, total, out = attend(
                q, top, total, out, tl.full((C.rows,), 0, tl.int32) + (context - 1),
                tables_ptr + sequence * table_width, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr,
                kv_head, start, stop, softcap_scale, factor, window, True, C,
            )  # fmt: skip
            if first_split == (context - 1) // C.split:
                store_rows(out_ptr, query, inside, finish(sinks_ptr, head, inside, top, total, out, C), C)
            else:
                slot = tl.load(slot_starts_ptr + sequence).to(tl.int64) + split
                rows = slot * C.num_heads + head
                store_partial(partial_out_ptr, partial_stats_ptr, rows, inside, top, total, out, C)


@jit
def prefix_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scales_ptr: tl.tensor,
    v_scales_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    contexts_ptr: tl.tensor,
    partial_out_ptr: tl.tensor,
    partial_stats_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    slot_starts_ptr: tl.tensor,
    items_ptr: tl.tensor,
    members_ptr: tl.tensor,
    table_width: int,
    softcap_scale: float,
    factor: float,
    window: int,
    C: tl.constexpr,
) -> None:
    """Shared prefixes: one split for the queries of several sequences, whose keys are read once."""
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    if item >= tl.load(counts_ptr + 3):
        return
    first_member = tl.load(items_ptr + item * 3)
    end_member = tl.load(items_ptr + item * 3 + 1)
    split = tl.load(items_ptr + item * 3 + 2)
    row = tl.arange(0, C.rows)
    member = first_member + row // C.group
    inside = (row // C.group < C.rows // C.group) & (member < end_member)
    sequence = tl.load(members_ptr + member, mask=inside, other=0).to(tl.int64)
    position = tl.load(contexts_ptr + sequence, mask=inside, other=0) - 1
    head = kv_head * C.group + row % C.group
    query = tl.load(query_starts_ptr + sequence, mask=inside, other=0).to(tl.int64) * C.num_heads + head
    q = load_rows(q_ptr, query, inside, C.k_dim, C.padded_k)
    leader = tl.load(members_ptr + first_member).to(tl.int64)
    top, total, out = nothing(C)
    top, total, out = attend(
        q, top, total, out, position, tables_ptr + leader * table_width, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr,
        kv_head, split * C.split, split * C.split + C.split, softcap_scale, factor, window, C.window, C,
    )  # fmt: skip
    slot = tl.load(slot_starts_ptr + sequence, mask=inside, other=0).to(tl.int64) + split
    rows = slot * C.num_heads + head
    store_partial(partial_out_ptr, partial_stats_ptr, rows, inside, top, total, out, C)


@jit
def merge_kernel(
    query_starts_ptr: tl.tensor,
    contexts_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partial_out_ptr: tl.tensor,
    partial_stats_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    slot_starts_ptr: tl.tensor,
    sequences_ptr: tl.tensor,
    window: int,
    C: tl.constexpr,
) -> None:
    """Merge the splits of one decode, in their order, for C.rows heads."""
    if tl.program_id(0) >= tl.load(counts_ptr + 1):
        return
    sequence = tl.load(sequences_ptr + tl.program_id(0)).to(tl.int64)
    context = tl.load(contexts_ptr + sequence)
    first = 0
    if C.window:
        first = tl.maximum(context - window, 0) // C.split
    last = (context - 1) // C.split
    if first == last:
        return
    head = tl.program_id(1) * C.rows + tl.arange(0, C.rows)
    inside = head < C.num_heads
    slot = tl.load(slot_starts_ptr + sequence).to(tl.int64)
    top, total, out = nothing(C)
    for split in range(first, last + 1):
        rows = (slot + split) * C.num_heads + head
        top_2 = tl.load(partial_stats_ptr + rows * 2, mask=inside, other=float("-inf"))
        total_2 = tl.load(partial_stats_ptr + rows * 2 + 1, mask=inside, other=0.0)
        out_2 = load_rows(partial_out_ptr, rows, inside, C.v_dim, C.padded_v)
        top, total, out = merge(top, total, out, top_2, total_2, out_2)
    query = tl.load(query_starts_ptr + sequence).to(tl.int64) * C.num_heads + head
    store_rows(out_ptr, query, inside, finish(sinks_ptr, head, inside, top, total, out, C), C)


@jit
def prefill_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scales_ptr: tl.tensor,
    v_scales_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    contexts_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    items_ptr: tl.tensor,
    table_width: int,
    softcap_scale: float,
    factor: float,
    window: int,
    C: tl.constexpr,
) -> None:
    """Prompt chunks: a tile of neighbouring queries of one sequence over all keys that they see."""
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    if item >= tl.load(counts_ptr + 2):
        return
    sequence = tl.load(items_ptr + item * 2).to(tl.int64)
    first = tl.load(items_ptr + item * 2 + 1)
    begin = tl.load(query_starts_ptr + sequence)
    num_queries = tl.load(query_starts_ptr + sequence + 1) - begin
    before = tl.load(contexts_ptr + sequence) - num_queries
    row = tl.arange(0, C.rows)
    index = first + row // C.group
    inside = (row // C.group < C.rows // C.group) & (index < num_queries)
    position = before + index
    head = kv_head * C.group + row % C.group
    query = (begin + index).to(tl.int64) * C.num_heads + head
    q = load_rows(q_ptr, query, inside, C.k_dim, C.padded_k)
    table_ptr = tables_ptr + sequence * table_width
    start = 0
    if C.window:
        start = tl.maximum(before + first - window + 1, 0) // C.keys * C.keys
    common = (before + first + 1) // C.keys * C.keys
    stop = before + tl.minimum(first + C.rows // C.group, num_queries)
    if C.split:
        top, total, out = nothing(C)
        for split in range(start // C.split, (stop - 1) // C.split + 1):
            end = tl.minimum(split * C.split + C.split, stop)
            top_2, total_2, out_2 = attend_range(
                q, position, table_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, kv_head,
                tl.maximum(split * C.split, start), tl.minimum(common, end), end, softcap_scale, factor, window, C,
            )  # fmt: skip
            top, total, out = merge(top, total, out, top_2, total_2, out_2)
    else:
        top, total, out = attend_range(
            q, position, table_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, kv_head,
            start, common, stop, softcap_scale, factor, window, C,
        )  # fmt: skip
    store_rows(out_ptr, query, inside, finish(sinks_ptr, head, inside, top, total, out, C), C)
