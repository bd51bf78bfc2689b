"""Each Triton kernel on a device against its reference on the processor, and what must hold to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from batchgen_kernels.attention_plan import plan_attention, tile_shape
from batchgen_kernels.copy_blocks import copy_blocks_reference, copy_blocks_triton
from batchgen_kernels.launch import Launch, jit, tl
from batchgen_kernels.paged_attention import paged_attention_reference, paged_attention_triton
from batchgen_kernels.philox import GROUP_DRAWS, gumbel, random_bits
from batchgen_kernels.rms_norm import rms_norm_reference, rms_norm_triton
from batchgen_kernels.rotary import rotary_reference, rotary_triton
from batchgen_kernels.sample import GROUP_TOKENS, SampleParams, TokenBias, sample_reference, sample_triton
from batchgen_kernels.sample_math import random_bits as triton_random_bits
from batchgen_kernels.sample_reference import group_stats
from batchgen_kernels.segments import SharedPrefixes
from batchgen_kernels.silu_mul import silu_mul_reference, silu_mul_triton
from batchgen_kernels.store_kv import store_kv_reference, store_kv_triton
from batchgen_kernels.top_tokens import (
    token_ranks_reference,
    token_ranks_triton,
    top_tokens_reference,
    top_tokens_triton,
)
from torch import Tensor

from tests.kernels.attention_cases import AttentionCase

LAST_PLACE = {torch.float32: 4e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""One unit in the last place of a value near 1; for fp32 what another order of sums may change."""

NEAR_TIE = 1e-5


class Comparison(NamedTuple):
    """How far two results lie apart, relative to values above 1."""

    name: str
    error: float
    tolerance: float


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, SharedPrefixes):
        return SharedPrefixes(*(part.to(device) for part in value))
    return [_moved(part, device) for part in value] if isinstance(value, list) else value


def _error(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.cpu().double(), expected.double()
    if actual.isnan().any():
        return float("inf")
    return float(((actual - expected).abs() / expected.abs().clamp(min=1)).max()) if len(expected) else 0.0


def _compare(
    name: str,
    tolerance: float,
    triton: Callable[..., Any],
    reference: Callable[..., Any],
    device: torch.device,
    *arguments: Any,
) -> Comparison:
    """Run both on the same inputs; what they return, or if nothing the arguments they changed, is compared."""
    moved = [_moved(argument, device) for argument in arguments]
    actual, expected = triton(*moved), reference(*arguments)
    if expected is None:
        actual, expected = moved, list(arguments)
    pairs = zip(_tensors(actual), _tensors(expected), strict=True)
    return Comparison(name, max(_error(ours, theirs) for ours, theirs in pairs), tolerance)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, (list, tuple)) else []


def elementwise(device: torch.device) -> Iterator[Comparison]:
    """rms_norm, rotary, silu_mul in every dtype."""
    for dtype, tolerance in LAST_PLACE.items():
        x, residual = (torch.randn(33, 4096).to(dtype) for _ in range(2))
        weight = torch.rand(4096).to(dtype)
        yield _compare(
            f"rms_norm {dtype}", 3 * tolerance, rms_norm_triton, rms_norm_reference, device, x, weight, 1e-5, residual
        )
        yield _compare(f"silu_mul {dtype}", tolerance, silu_mul_triton, silu_mul_reference, device, x * 3)
        q, k = torch.randn(33, 9, 128).to(dtype), torch.randn(33, 3, 128).to(dtype)
        angle = torch.rand(33, 128).to(dtype)
        yield _compare(
            f"rotary {dtype}", tolerance, rotary_triton, rotary_reference, device, q, k, angle.cos(), angle.sin()
        )


def cache_writes(device: torch.device) -> Iterator[Comparison]:
    """store_kv and copy_blocks; quantized codes must be equal, so their tolerance is 0."""
    dtypes = [torch.bfloat16, torch.int8]
    if device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9):
        dtypes.append(torch.float8_e4m3fn)
    for dtype in dtypes:
        k, v = torch.randn(40, 3, 128), torch.randn(40, 3, 80)
        caches = [torch.zeros(9, 3, 16, dim).to(dtype) for dim in (128, 80)]
        scales = [torch.zeros(9, 3, 16), torch.zeros(9, 3, 16)]
        slots = torch.randperm(9 * 16)[:40]
        slots[::7] = -1
        tolerance = LAST_PLACE[torch.bfloat16] if dtype == torch.bfloat16 else 0.0
        yield _compare(
            f"store_kv {dtype}", tolerance, store_kv_triton, store_kv_reference, device, k, v, *caches, slots, *scales
        )
    caches = [torch.randn(20, 3, 16, 128), torch.randn(20, 3, 16, 80)]
    pairs = torch.tensor([[0, 19], [3, 7], [3, 8]])
    yield _compare("copy_blocks", 0.0, copy_blocks_triton, copy_blocks_reference, device, caches, pairs)


def attention_cases(small: bool) -> Iterator[AttentionCase]:
    """Decodes, chunks and shared prefixes at the head sizes of common models; `small` for the interpreter."""
    long = 300 if small else 3000
    mixed = AttentionCase([long, 70, 600, 1], [1, 40, 1, 1], heads=(8, 2), dims=(128, 128), dtype=torch.bfloat16)
    yield mixed
    yield replace(mixed, dtype=torch.float32, window=100, softcap=20.0, sinks=True)
    yield replace(mixed, cache_dtype=torch.int8)
    yield replace(mixed, heads=(9, 3), dims=(64, 64), dtype=torch.float16)
    yield replace(mixed, heads=(4, 4), dims=(192, 128))
    yield replace(mixed, heads=(4, 2), dims=(256, 256))
    yield AttentionCase(
        [long, long - 7, 290, 281],
        [1] * 4,
        heads=(8, 2),
        dims=(128, 128),
        dtype=torch.bfloat16,
        shared={(0, 1, 2, 3): 256},
    )


def attention(device: torch.device, small: bool) -> Iterator[Comparison]:
    """paged_attention; narrow dtypes round the weights and the output."""
    for case in attention_cases(small):
        options = {name: _moved(value, device) for name, value in case.options().items()}
        arguments = [_moved(value, device) for value in case.arguments()]
        actual = paged_attention_triton(*arguments, **options, prefixes=case.prefixes)
        expected = paged_attention_reference(*case.arguments(), **case.options())
        name = f"paged_attention {case.heads} x {case.dims} {case.dtype} {case.cache_dtype or ''}"
        yield Comparison(name, _error(actual, expected), 2 * LAST_PLACE[case.dtype])


def deterministic_attention(device: torch.device) -> bool:
    """Whether deterministic tiles give a query the same bits in a batch, alone, chunked and with a shared prefix."""
    case = AttentionCase(
        [600, 530, 700], [1, 1, 90], heads=(8, 2), dims=(128, 128), dtype=torch.bfloat16, shared={(0, 1, 2): 512}
    )
    options = {name: _moved(value, device) for name, value in case.options().items()}
    shape = tile_shape(*case.heads, 128, deterministic=True)
    plan = plan_attention(case.starts, case.contexts, shape, prefixes=case.prefixes, device=device)
    whole = paged_attention_triton(*(_moved(x, device) for x in case.arguments()), **options, plan=plan)
    same = True
    for sequence, chunk in ((0, range(1)), (1, range(1)), (2, range(33)), (2, range(33, 34)), (2, range(34, 90))):
        arguments, rows = case.alone(sequence, chunk)
        plan = plan_attention(arguments[4], arguments[5], shape, device=device)
        alone = paged_attention_triton(*(_moved(x, device) for x in arguments), **options, plan=plan)
        same &= torch.equal(alone, whole[rows])
    return same


@jit
def _bits_kernel(keys_ptr: tl.tensor, out_ptr: tl.tensor, DRAWS: tl.constexpr) -> None:
    """Store the first DRAWS noise words of one row."""
    row = tl.program_id(0)
    draw = tl.arange(0, DRAWS)
    tl.store(out_ptr + row * DRAWS + draw, triton_random_bits(keys_ptr + row * 5, draw).to(tl.int64))


def random_bits_are_equal(device: torch.device) -> bool:
    """Whether device and processor have the same random bits, exactly."""
    keys = torch.randint(0, 2**31, (50, 5))
    keys[:, 0] = torch.randint(0, 2**63 - 1, (50,))
    out = torch.zeros(50, 512, dtype=torch.int64, device=device)
    Launch(_bits_kernel, (50,), {"keys_ptr": keys.to(device), "out_ptr": out}, {"DRAWS": 512}).run()
    return torch.equal(out.cpu(), random_bits(keys, torch.zeros(50, dtype=torch.int64), 512))


def _margins(logits_RV: Tensor, keys_R5: Tensor) -> Tensor:
    """The least gap between the two best perturbed scores, of the groups or within the chosen group."""
    groups_RG = group_stats(logits_RV).sums_RG
    first = torch.full((len(keys_R5),), GROUP_DRAWS)
    scores_RG = groups_RG + gumbel(random_bits(keys_R5, first, groups_RG.shape[1]))
    first = scores_RG.argmax(1) * GROUP_TOKENS
    token_RL = first[:, None] + torch.arange(GROUP_TOKENS)
    y_RL = logits_RV.gather(1, token_RL.clamp(max=logits_RV.shape[1] - 1)).masked_fill(
        token_RL >= logits_RV.shape[1], -torch.inf
    )
    scores_RL = y_RL + gumbel(random_bits(keys_R5, first, GROUP_TOKENS))
    gaps = [x.topk(2).values.diff().abs().squeeze(1) for x in (scores_RG, scores_RL)]
    return torch.minimum(*gaps)


def sampled_tokens(device: torch.device, rows: int, vocabulary: int) -> dict[str, Any]:
    """Draws of both; a token may differ only where the two best perturbed scores all but tie."""
    logits = torch.randn(rows, vocabulary) * 3
    keys = torch.zeros(rows, 5, dtype=torch.int64)
    keys[:, 2] = torch.arange(rows)
    report: dict[str, Any] = {}
    row = torch.ones(rows)
    for name, params in {
        "greedy": SampleParams(all_greedy=True),
        "plain": SampleParams(),
        "top-k": SampleParams(top_k_R=(row * 50).long()),
        "top-p": SampleParams(top_p_R=row * 0.9),
        "min-p": SampleParams(min_p_R=row * 0.05, temperature_R=row * 0.8),
    }.items():
        moved = SampleParams(**{key: _moved(value, device) for key, value in vars(params).items()})
        ours = sample_triton(logits.to(device), moved, keys.to(device))
        theirs = sample_reference(logits, params, keys)
        differ = ours.token_ids_R.cpu() != theirs.token_ids_R
        report[name] = int(differ.sum())
        if name == "plain":
            report["plain, no near tie"] = int((differ & (_margins(logits, keys) >= NEAR_TIE)).sum())
    # With filters a border may fall the other way too: a few in a thousand rows would be a fault, one is none.
    report["ok"] = report["greedy"] == 0 and report["plain, no near tie"] == 0 and max(report.values()) <= 2
    return report


def best_tokens(device: torch.device, rows: int, vocabulary: int) -> Iterator[Comparison]:
    """top_tokens and token_ranks; ids and ranks must be equal, also among equal logits."""
    logits = (torch.randn(rows, vocabulary) * 12).round() / 4
    bans = TokenBias(torch.arange(rows), torch.arange(rows), torch.full((rows,), -torch.inf))
    asked = torch.randint(vocabulary, (rows, 3))
    for name, ours, theirs in (
        ("top_tokens", top_tokens_triton(logits.to(device), 20), top_tokens_reference(logits, 20)),
        (
            "top_tokens, edited",
            top_tokens_triton(logits.to(device), 20, SampleParams(bias=TokenBias(*_moved(list(bans), device)))),
            top_tokens_reference(logits, 20, SampleParams(bias=bans)),
        ),
        (
            "token_ranks",
            token_ranks_triton(logits.to(device), asked.to(device), 5),
            token_ranks_reference(logits, asked, 5),
        ),
    ):
        for column, actual, expected in zip(ours._fields, ours, theirs, strict=True):
            tolerance = LAST_PLACE[torch.float32] if expected.is_floating_point() else 0.0
            yield Comparison(f"{name}, {column}", _error(actual, expected), tolerance)


def compare_all(device: torch.device) -> dict[str, Any]:
    """Run every comparison."""
    torch.manual_seed(0)
    small = device.type != "cuda"
    logits_size = (4, 700) if small else (1024, 128256)
    comparisons = [*elementwise(device), *cache_writes(device), *attention(device, small)]
    comparisons += best_tokens(device, *logits_size)
    sampled = sampled_tokens(device, *logits_size)
    exact = {
        "random bits": random_bits_are_equal(device),
        "deterministic attention": deterministic_attention(device),
    }
    within = all(comparison.error <= comparison.tolerance for comparison in comparisons)
    return {
        "comparisons": [comparison._asdict() for comparison in comparisons],
        "sampled tokens that differ": sampled,
        "equal bits": exact,
        "ok": within and sampled["ok"] and all(exact.values()),
    }
