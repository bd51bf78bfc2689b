"""paged_attention: reference against plain softmax attention, Triton kernels against both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from batchgen_kernels.attention_plan import plan_attention, reserve_plan, tile_shape, update_plan
from batchgen_kernels.paged_attention import paged_attention, paged_attention_reference, paged_attention_triton
from torch import Tensor

from tests.kernels.attention_cases import AttentionCase

CASES: dict[str, Callable[[], AttentionCase]] = {
    "single tokens": lambda: AttentionCase([1, 1], [1, 1]),
    "decodes": lambda: AttentionCase([1, 63, 64, 65, 300], [1, 1, 1, 1, 1]),
    "prompts": lambda: AttentionCase([1, 17, 130], [1, 17, 130], seed=1),
    "chunks beside decodes": lambda: AttentionCase([200, 5, 90, 64], [7, 1, 40, 1], heads=(9, 3), seed=2),
    "a sequence without queries": lambda: AttentionCase([70, 30, 12], [3, 0, 1], seed=3),
    "no grouping": lambda: AttentionCase([40, 70], [5, 1], heads=(3, 3), seed=4),
    "all heads in one group": lambda: AttentionCase([70, 33], [1, 3], heads=(20, 1), seed=5),
    "odd sizes": lambda: AttentionCase([90, 7], [3, 1], heads=(5, 5), dims=(24, 24), block_size=8, seed=6),
    "values of another size": lambda: AttentionCase([80, 20], [1, 6], dims=(24, 16), seed=7),
    "blocks of one token": lambda: AttentionCase([70], [2], block_size=1, seed=8),
    "whole segments as blocks": lambda: AttentionCase([150, 64], [1, 9], block_size=64, seed=9),
    "window": lambda: AttentionCase([300, 90, 30], [1, 20, 30], window=17, seed=10),
    "window of one": lambda: AttentionCase([66, 10], [1, 10], window=1, seed=11),
    "window over splits": lambda: AttentionCase([600, 290], [1, 1], window=270, heads=(2, 1), seed=12),
    "softcap": lambda: AttentionCase([70, 30], [1, 30], softcap=2.0, seed=13),
    "sinks": lambda: AttentionCase([300, 30], [1, 30], sinks=True, seed=14),
    "everything": lambda: AttentionCase([290, 100], [1, 50], window=70, softcap=5.0, sinks=True, dims=(24, 20)),
    "shared prefix": lambda: AttentionCase(
        [600, 530, 513, 40, 515, 700], [1, 1, 1, 1, 1, 3], heads=(4, 2), shared={(0, 1, 2, 4, 5): 512}, seed=16
    ),
    "shared prefixes of no whole split": lambda: AttentionCase([200, 300], [1, 1], shared={(0, 1): 128}, seed=17),
    "two shared prefixes": lambda: AttentionCase(
        [300, 270, 560, 540], [1] * 4, heads=(2, 1), sinks=True, window=400, shared={(0, 1): 256, (2, 3): 512}, seed=18
    ),
}  # fmt: skip

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}
"""Absolute, for outputs near 1: fp32 sums, or the rounding of the weights and of the output."""


def triton(case: AttentionCase, **options: Any) -> Tensor:
    """Run the Triton kernels into a poisoned output."""
    out = torch.full((len(case.q), case.heads[0], case.dims[1]), torch.nan).to(case.dtype)
    return paged_attention_triton(*case.arguments(), **case.options(), prefixes=case.prefixes, out=out, **options)


@pytest.mark.parametrize("make", CASES.values(), ids=list(CASES))
def test_reference_is_softmax_attention(make: Callable[[], AttentionCase]) -> None:
    case = make()
    out = paged_attention_reference(*case.arguments(), **case.options(), prefixes=case.prefixes)
    torch.testing.assert_close(out.double(), case.expected(), rtol=0, atol=3e-6)


@pytest.mark.parametrize("make", CASES.values(), ids=list(CASES))
def test_triton_is_softmax_attention(make: Callable[[], AttentionCase]) -> None:
    case = make()
    torch.testing.assert_close(triton(case).double(), case.expected(), rtol=0, atol=3e-6)


@pytest.mark.parametrize("cache_dtype", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_equal_the_reference(dtype: torch.dtype, cache_dtype: torch.dtype | None) -> None:
    case = AttentionCase([70, 40, 270], [1, 9, 1], heads=(4, 2), dtype=dtype, cache_dtype=cache_dtype, seed=20)
    reference = paged_attention_reference(*case.arguments(), **case.options())
    torch.testing.assert_close(reference.double(), case.expected(), rtol=0, atol=TOLERANCE[dtype])
    torch.testing.assert_close(triton(case).float(), reference.float(), rtol=0, atol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_caches_are_read_with_their_scales(cache_dtype: torch.dtype) -> None:
    case = AttentionCase([70, 40], [1, 9], cache_dtype=cache_dtype, seed=21)
    for out in (paged_attention_reference(*case.arguments(), **case.options()), triton(case)):
        torch.testing.assert_close(out.double(), case.expected(), rtol=0, atol=3e-6)


def test_few_programs_walk_over_all_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchgen_kernels.paged_attention.num_processors", lambda device: 1)
    case = AttentionCase([300, 1, 64, 520, 7], [1] * 5, seed=22)
    torch.testing.assert_close(triton(case).double(), case.expected(), rtol=0, atol=3e-6)


def test_a_reserved_plan_serves_one_batch_after_another() -> None:
    cases = [AttentionCase([300, 70, 5], [1] * 3, seed=23), AttentionCase([9], [1], seed=24)]
    shape = tile_shape(*cases[0].heads, cases[0].dims[0])
    reserved = reserve_plan(shape, num_sequences=4, num_splits=8, num_prefix_items=2, device=torch.device("cpu"))
    for case in cases:
        update_plan(reserved, plan_attention(case.starts, case.contexts, shape))
        torch.testing.assert_close(triton(case, plan=reserved).double(), case.expected(), rtol=0, atol=3e-6)


def test_no_queries_give_an_empty_output() -> None:
    case = AttentionCase([5], [0])
    assert paged_attention(*case.arguments(), **case.options()).shape == (0, 6, 16)
    assert paged_attention_triton(*case.arguments(), **case.options()).shape == (0, 6, 16)


@pytest.mark.parametrize("attend", [paged_attention_reference, paged_attention_triton])
def test_a_block_size_that_does_not_divide_a_segment_is_refused(attend: Any) -> None:
    case = AttentionCase([5], [1], block_size=24)
    with pytest.raises(ValueError, match="block_size must divide 64, got 24"):
        attend(*case.arguments(), **case.options())


@pytest.mark.parametrize("name", ["chunks beside decodes", "everything", "shared prefix"])
def test_reference_has_the_same_bits_however_it_is_batched(name: str) -> None:
    case = CASES[name]()
    whole = paged_attention_reference(*case.arguments(), **case.options(), prefixes=case.prefixes)
    for sequence, count in enumerate(case.queries):
        for chunk in (range(count), range(count // 2), range(count // 2, count), range(max(0, count - 1), count)):
            arguments, rows = case.alone(sequence, chunk)
            assert torch.equal(paged_attention_reference(*arguments, **case.options()), whole[rows])


def test_reference_has_the_same_bits_with_any_number_of_threads() -> None:
    case = replace(CASES["chunks beside decodes"](), dims=(64, 64))
    whole = paged_attention_reference(*case.arguments(), **case.options())
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        assert torch.equal(paged_attention_reference(*case.arguments(), **case.options()), whole)


def test_deterministic_triton_has_the_same_bits_chunked_and_shared() -> None:
    case = replace(CASES["shared prefix"](), contexts=[280, 270, 300], queries=[1, 1, 20], shared={(0, 1, 2): 256})
    shape = tile_shape(*case.heads, case.dims[0], deterministic=True)
    plan = plan_attention(case.starts, case.contexts, shape, prefixes=case.prefixes)
    assert len(plan.prefix_items_Y3) == 1
    whole = triton(case, plan=plan)
    torch.testing.assert_close(whole.double(), case.expected(), rtol=0, atol=3e-6)
    for sequence, chunk in ((0, range(1)), (1, range(1)), (2, range(3)), (2, range(3, 4)), (2, range(4, 20))):
        arguments, rows = case.alone(sequence, chunk)
        alone = plan_attention(arguments[4], arguments[5], shape)
        assert torch.equal(paged_attention_triton(*arguments, **case.options(), plan=alone), whole[rows])
