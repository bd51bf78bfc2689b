"""The C++ attention equals the reference, and a query's bits do not depend on what else is in the call."""

from __future__ import annotations

import pytest
import torch
from batchgen_kernels import cpu
from batchgen_kernels.paged_attention import paged_attention_reference
from batchgen_kernels.store_kv import store_kv_reference
from torch import Tensor

from tests.kernels.cpu_cases import Geometry, PagedCase, needs_kernels, paged_case

pytestmark = needs_kernels

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}
LEVELS = cpu.levels() if cpu.is_available() else []
GEOMETRIES = [
    Geometry(),
    Geometry(16, 16, 4, 4, 8),
    Geometry(128, 128, 8, 1, 64),
    Geometry(80, 80, 6, 2, 32),
    Geometry(256, 256, 4, 2, 1),
    Geometry(96, 64, 5, 5, 16),
    Geometry(40, 24, 4, 2, 4),
    Geometry(192, 128, 32, 2, 2),
]
OPTIONS = [{}, {"window": 50}, {"window": 1}, {"softcap": 5.0}, {"sinks_H": True}, {"kv_dtype": torch.int8}]


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    """Each instruction-set level that this processor runs."""
    cpu.set_level(request.param)
    return str(request.param)


def expected(case: PagedCase) -> Tensor:
    """The reference on fp32 copies, so that only the kernel's own rounding shows."""
    widened = (x.float() if x.is_floating_point() else x for x in case[:3])
    return paged_attention_reference(*widened, *case[3:6], **case.options)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options), "plain"))
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_equals_the_reference(dtype: torch.dtype, geometry: Geometry, options: dict[str, object]) -> None:
    options = dict(options)
    if "sinks_H" in options:
        options["sinks_H"] = torch.linspace(-1, 3, geometry.num_heads)
    case = paged_case([1, 64, 65, 200, 333], [1, 1, 3, 20, 1], dtype, geometry, **options)
    reference = expected(case)
    for level in LEVELS:
        cpu.set_level(level)
        torch.testing.assert_close(case.attend().float(), reference, atol=TOLERANCE[dtype], rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("level")
def test_a_decode_has_the_same_bits_among_any_neighbours(dtype: torch.dtype) -> None:
    lens = [1 + 37 * s % 300 for s in range(65)]
    case = paged_case(lens, [1] * len(lens), dtype)
    alone = torch.cat([case.of_sequences([s]).attend() for s in range(len(lens))])
    for count in (2, 3, 7, 33, 65):
        order = torch.randperm(len(lens), generator=torch.Generator().manual_seed(count))[:count].tolist()
        assert torch.equal(case.of_sequences(order).attend(), alone[order])


@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("level")
def test_a_query_has_the_same_bits_in_every_chunk_size(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    length = 530
    whole = paged_case([length, 70], [length, 1], dtype, kv_dtype=kv_dtype, window=200, softcap=20.0)
    together = whole.rows_of(whole.attend(), 0)
    for chunk in (1, 16, 64, 512):
        # One sequence per chunk over the same blocks: any may be computed in one call.
        ends = [*range(chunk, length, chunk), length]
        counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        case = whole._replace(
            q=whole.q[:length],
            block_tables=whole.block_tables[:1].expand(len(ends), -1).contiguous(),
            query_starts=torch.tensor([0, *counts]).cumsum(0).int(),
            context_lens=torch.tensor(ends).int(),
        )
        assert torch.equal(case.attend(), together)
        assert torch.equal(case.attend(share=False), together)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("level")
def test_bits_do_not_depend_on_which_blocks_hold_the_context(dtype: torch.dtype) -> None:
    first, second = (paged_case([300, 129], [3, 1], dtype, block_seed=seed) for seed in (0, 1))
    assert not torch.equal(first.block_tables, second.block_tables)
    assert torch.equal(first.attend(), second.attend())


@pytest.mark.parametrize("window", [None, 100], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("level")
def test_a_shared_prefix_changes_no_bit(dtype: torch.dtype, window: int | None) -> None:
    lens = [200 + 13 * s % 170 for s in range(20)]
    case = paged_case(lens, [1 + s % 4 for s in range(20)], dtype, shared_tokens=192, window=window)
    # Some go on together for one segment more, so that groups lie within groups.
    tables, longest = case.block_tables.clone(), lens.index(max(lens))
    tables[::3, 12:] = tables[longest, 12:]
    case = case._replace(block_tables=tables, context_lens=torch.tensor(lens).int())
    shared = case.attend()
    assert torch.equal(shared, case.attend(share=False))
    for sequence in range(len(case.context_lens)):
        assert torch.equal(case.of_sequences([sequence]).attend(), case.rows_of(shared, sequence))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"window": 100}, {"kv_dtype": torch.int8}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("level")
def test_decodes_behind_prefixes_change_no_bit(dtype: torch.dtype, options: dict[str, object], threads: int) -> None:
    # Enough for each thread to take whole groups, from prefix to ends; beside them two sequences that share nothing.
    lens = [193 + 13 * s % 170 for s in range(50)]
    case = paged_case(lens, [1] * len(lens), dtype, shared_tokens=192, **options)
    tables, apart = case.block_tables.clone(), paged_case(lens, [1] * len(lens), dtype, shared_tokens=0).block_tables
    for group in range(4):
        members = range(group, 48, 4)
        tables[members, :12] = apart[group, :12]
        tables[list(members[::3]), 12:16] = apart[group, 12:16]  # some go on together for one segment more
    tables[48:, :12] = apart[48:, :12]
    case.k_cache.nan_to_num_(), case.v_cache.nan_to_num_()  # the blocks of `apart` were written for other tables
    for name in ("k_scales", "v_scales"):
        if name in case.options:
            case.options[name].nan_to_num_(0.01)
    case = case._replace(block_tables=tables)
    torch.set_num_threads(threads)
    shared = case.attend()
    assert torch.equal(shared, case.attend(share=False))
    for sequence in range(len(lens)):
        assert torch.equal(case.of_sequences([sequence]).attend(), case.rows_of(shared, sequence))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("level")
def test_bits_do_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    case = paged_case([64 + 31 * s for s in range(12)], [1 + s for s in range(12)], dtype, shared_tokens=64)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(case.attend())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.usefixtures("level")
def test_blocks_that_left_the_window_are_not_read() -> None:
    case = paged_case([300], [2], torch.bfloat16, window=70)
    before = case.attend()
    tables = case.block_tables.clone()
    tables[:, : (298 - 69) // 16] = -(2**31)
    assert torch.equal(case._replace(block_tables=tables).attend(), before)


@pytest.mark.usefixtures("level")
def test_not_a_number_in_a_key_reaches_only_its_own_sequence() -> None:
    case = paged_case([90, 90], [1, 1], torch.bfloat16)
    before = case.attend()
    case.k_cache[int(case.block_tables[0, 2])] = float("nan")
    after = case.attend()
    assert after[0].isnan().all()
    assert torch.equal(after[1], before[1])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=str)
@pytest.mark.usefixtures("level")
def test_what_is_not_finite_in_a_query_reaches_only_its_own_heads(kv_dtype: torch.dtype | None, value: float) -> None:
    case = paged_case([90, 40, 90], [20, 1, 1], torch.bfloat16, kv_dtype=kv_dtype)
    before = case.attend()
    for token in (7, 20):
        case.q[token, 4, 5] = value
        after = case.attend()
        assert after[token, 4].isnan().all()
        after[token, 4] = before[token, 4]
        assert torch.equal(after, before)
        case.q[token, 4, 5] = 0
        before = case.attend()


@pytest.mark.usefixtures("level")
def test_queries_of_zeros_and_of_tiny_numbers_see_all_int8_keys_alike() -> None:
    case = paged_case([90, 40], [1, 1], torch.bfloat16, kv_dtype=torch.int8)
    case.q[0], case.q[1] = 0, case.q[1] * 1e-36
    zeros = case._replace(q=torch.zeros_like(case.q)).attend()
    assert zeros.isfinite().all()
    assert torch.equal(case.attend(), zeros)


@pytest.mark.usefixtures("level")
def test_queries_may_be_views_into_a_merged_projection() -> None:
    case = paged_case([100, 30], [5, 1], torch.bfloat16)
    merged = torch.zeros(6, 15, 64, dtype=torch.bfloat16)
    merged[:, :9] = case.q
    assert torch.equal(case._replace(q=merged[:, :9]).attend(), case.attend())
    heads_first = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(case._replace(q=heads_first).attend(), case.attend())


def test_sequences_without_queries_and_empty_calls_are_allowed() -> None:
    case = paged_case([100, 30], [5, 1], torch.bfloat16)
    idle = case._replace(
        query_starts=torch.tensor([0, 5, 5, 6]).int(),
        context_lens=torch.tensor([100, 64, 30]).int(),
        block_tables=case.block_tables[[0, 0, 1]],
    )
    assert torch.equal(idle.attend(), case.attend())
    assert case.of_sequences([]).attend().shape == (0, 9, 64)


@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("level")
def test_store_kv_equals_the_reference(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    stored = kv_dtype or dtype
    k, v = torch.randn(40, 3, 24).to(dtype), torch.randn(40, 5, 3).transpose(1, 2)[:, :, :5].to(dtype)
    k[3] = 0
    slots = torch.randperm(48)[:40]
    slots[7] = -1
    results = []
    for store in (cpu.store_kv, store_kv_reference):
        caches = [torch.zeros(6, 3, 8, 24, dtype=stored), torch.zeros(6, 3, 8, 5, dtype=stored)]
        scales = [torch.zeros(6, 3, 8), torch.zeros(6, 3, 8)] if kv_dtype else [None, None]
        store(k, v, *caches, slots, *scales)
        results.append([*caches, *(x for x in scales if x is not None)])
    for ours, reference in zip(*results, strict=True):
        assert torch.equal(ours, reference)


def test_copy_blocks_copies_whole_blocks_of_every_cache() -> None:
    caches = [torch.randn(7, 3, 16, 8), torch.randn(7, 2, 16, 4).bfloat16(), torch.randn(7, 3, 16)]
    before = [cache.clone() for cache in caches]
    cpu.copy_blocks(caches, torch.tensor([[1, 4], [2, 0]]))
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache, old[[2, 1, 2, 3, 1, 5, 6]])
    cpu.copy_blocks(caches, torch.empty(0, 2, dtype=torch.int64))


def test_what_does_not_fit_is_refused_by_name() -> None:
    case = paged_case([30], [1])
    with pytest.raises(TypeError, match=r"q must be torch.float32 or torch.bfloat16, got torch.float16"):
        case._replace(q=case.q.half()).attend()
    with pytest.raises(TypeError, match=r"k_cache must be torch.bfloat16 or torch.int8, got torch.float32"):
        case._replace(q=case.q.bfloat16()).attend()
    with pytest.raises(TypeError, match=r"block_tables_SB must be torch.int32"):
        case._replace(block_tables=case.block_tables.long()).attend()
    with pytest.raises(ValueError, match="block_size must divide 64, got 24"):
        case._replace(k_cache=torch.zeros(2, 3, 24, 64), v_cache=torch.zeros(2, 3, 24, 64)).attend()
    with pytest.raises(ValueError, match="must be contiguous"):
        case._replace(k_cache=case.k_cache.transpose(2, 3).contiguous().transpose(2, 3)).attend()
    with pytest.raises(ValueError, match="does not fit"):
        case._replace(q=case.q[:, :8]).attend()
