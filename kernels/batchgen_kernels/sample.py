"""sample: draw one token per row from its logits.

Legend: R rows, V vocabulary, G groups of GROUP_TOKENS neighbouring token ids, N entries of a list of edits.

    edited = (logits + bias) after the penalties;  y = edited / temperature;  top-k, top-p, min-p drop tokens
    group  = argmax_g logsumexp(y of g's kept tokens) + gumbel(g);  token = argmax of y + gumbel over its kept tokens
The two steps draw exactly from softmax(y): a group comes up with its share of the mass, a token with its share of the
group. They need V / 256 + 256 random numbers, not V, and a last-bit difference in y changes a token only where the two
best perturbed scores of a step all but tie. No row's result depends on another row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from batchgen_kernels.launch import Launch, next_power_of_2, runs_on_triton
from batchgen_kernels.philox import POSITION
from batchgen_kernels.sample_filters import filter_kernel
from batchgen_kernels.sample_kernels import bias_kernel, draw_kernel, group_kernel, penalty_kernel
from batchgen_kernels.sample_reference import log_normalizer, sample_reference
from batchgen_kernels.sample_types import GROUP_TOKENS, SampleParams, SampleResult, TokenBias, TokenCounts

__all__ = [
    "GROUP_TOKENS",
    "SampleParams",
    "SampleResult",
    "SampleSteps",
    "TokenBias",
    "TokenCounts",
    "log_normalizer",
    "sample",
    "sample_launches",
    "sample_reference",
    "sample_triton",
]

BLOCK_N = 256
"""Edits per program."""

GROUPS_PER_TILE = 8


class SampleBuffers(NamedTuple):
    """What the kernels of one call hand to each other, and the result."""

    edited_RV: Tensor
    """The logits after bias and penalties; the logits themselves where there are none."""
    raw_sums_RG: Tensor
    sums_RG: Tensor
    tops_RG: Tensor
    best_RG: Tensor
    limits_R3: Tensor
    result: SampleResult

    @classmethod
    def allocate(cls, logits_RV: Tensor, params: SampleParams) -> SampleBuffers:
        """Allocate on the logits' device; nothing is filled but the copy of the logits that edits act on."""
        edited = logits_RV
        if params.bias is not None or params.counts is not None:
            edited = logits_RV.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        num_rows, num_groups = len(logits_RV), -(-logits_RV.shape[1] // GROUP_TOKENS)

        def empty(width: int, dtype: torch.dtype) -> Tensor:
            return logits_RV.new_empty((num_rows, width), dtype=dtype)

        raw_sums = empty(num_groups, torch.float32)
        # Without edits and temperature y is the logits, and (until filters act) so are its sums.
        same = edited is logits_RV and params.temperature_R is None
        filters = any(x is not None for x in (params.top_k_R, params.top_p_R, params.min_p_R))
        result = (empty(1, dtype).squeeze(1) for dtype in (torch.int64, torch.float32, torch.bool))
        return cls(
            edited_RV=edited,
            raw_sums_RG=raw_sums,
            sums_RG=raw_sums if same and not filters else empty(num_groups, torch.float32),
            tops_RG=empty(num_groups, torch.float32),
            best_RG=empty(num_groups, torch.int32),
            limits_R3=empty(3, torch.int32),
            result=SampleResult(*result),
        )


class SampleCall(NamedTuple):
    """One call's tensors, as the launches take them."""

    logits_RV: Tensor
    params: SampleParams
    keys_R5: Tensor
    buffers: SampleBuffers

    def launch(self, kernel: Any, grid: tuple[int, ...], constants: dict[str, Any], num_warps: int) -> Launch:
        """Describe a launch of `kernel`, which takes those of all arguments that it names; what is unused is any."""
        params, buffers, (_, vocabulary) = self.params, self.buffers, self.logits_RV.shape
        unused = self.keys_R5
        known: dict[str, Any] = {
            "logits_ptr": self.logits_RV,
            "edited_ptr": buffers.edited_RV,
            "temperature_ptr": unused if params.temperature_R is None else params.temperature_R,
            "top_k_ptr": unused if params.top_k_R is None else params.top_k_R,
            "top_p_ptr": unused if params.top_p_R is None else params.top_p_R,
            "min_p_ptr": unused if params.min_p_R is None else params.min_p_R,
            "repetition_ptr": unused if params.repetition_penalty_R is None else params.repetition_penalty_R,
            "presence_ptr": unused if params.presence_penalty_R is None else params.presence_penalty_R,
            "frequency_ptr": unused if params.frequency_penalty_R is None else params.frequency_penalty_R,
            "keys_ptr": self.keys_R5,
            "raw_sums_ptr": buffers.raw_sums_RG,
            "sums_ptr": buffers.sums_RG,
            "tops_ptr": buffers.tops_RG,
            "best_ptr": buffers.best_RG,
            "limits_ptr": buffers.limits_R3,
            "token_ids_ptr": buffers.result.token_ids_R,
            "logprobs_ptr": buffers.result.logprobs_R,
            "ok_ptr": buffers.result.ok_R,
            "vocabulary": vocabulary,
            "num_groups": buffers.tops_RG.shape[1],
            "logits_stride": self.logits_RV.stride(0),
            "edited_stride": buffers.edited_RV.stride(0),
        }
        arguments = {name: known[name] for name in kernel.arg_names if name in known}
        return Launch(kernel, grid, arguments, constants, num_warps=num_warps)

    def edits(self) -> list[Launch]:
        """Describe the launches of bias and penalties, which act on the copy of the logits in place."""
        launches = []
        for kernel, entries in ((bias_kernel, self.params.bias), (penalty_kernel, self.params.counts)):
            if entries is None:
                continue
            constants: dict[str, Any] = {"BLOCK_N": BLOCK_N}
            if kernel is penalty_kernel:
                constants["REPETITION"] = self.params.repetition_penalty_R is not None
                constants["PRESENCE"] = self.params.presence_penalty_R is not None
                constants["FREQUENCY"] = self.params.frequency_penalty_R is not None
            launch = self.launch(kernel, (-(-len(entries[0]) // BLOCK_N),), constants, 4)
            names = ("row_ptr", "token_ptr", "value_ptr" if kernel is bias_kernel else "count_ptr")
            launch.arguments.update(zip(names, entries, strict=True), num_entries=len(entries[0]))
            launches.append(launch)
        return launches


def sample_launches(logits_RV: Tensor, params: SampleParams, keys_R5: Tensor, buffers: SampleBuffers) -> list[Launch]:
    """Describe the launches of one call, in order; rows of the logits may be strided, their tokens not."""
    call = SampleCall(logits_RV, params, keys_R5, buffers)
    num_rows, num_groups = buffers.tops_RG.shape
    temperature = params.temperature_R is not None and not params.all_greedy
    used = {"TOP_K": params.top_k_R, "TOP_P": params.top_p_R, "MIN_P": params.min_p_R}
    filters = {name: vector is not None and not params.all_greedy for name, vector in used.items()}
    group = {
        "SAME": buffers.edited_RV is logits_RV,
        "APART": buffers.sums_RG is not buffers.raw_sums_RG and not params.all_greedy,
        "TEMPERATURE": temperature,
        "GROUP": GROUP_TOKENS,
        "BLOCK_G": GROUPS_PER_TILE,
    }
    padded = max(16, next_power_of_2(num_groups))
    launches = [*call.edits(), call.launch(group_kernel, (num_rows, -(-num_groups // GROUPS_PER_TILE)), group, 4)]
    if any(filters.values()):
        limits = {"TEMPERATURE": temperature, "GROUP": GROUP_TOKENS, "GROUPS": GROUPS_PER_TILE, "BLOCK_G": padded}
        launches.append(call.launch(filter_kernel, (num_rows,), filters | limits, 8))
    draw = {
        "GREEDY": params.all_greedy,
        "TEMPERATURE": temperature,
        "TOP_K": filters["TOP_K"],
        "FILTERS": any(filters.values()),
        "GROUP": GROUP_TOKENS,
        "BLOCK_G": padded,
    }
    return [*launches, call.launch(draw_kernel, (num_rows,), draw, 4)]


def sample_triton(logits_RV: Tensor, params: SampleParams, keys_R5: Tensor) -> SampleResult:
    """Draw by the Triton kernels; see `sample`. The vectors of `params` are fp32, top_k_R any integers."""
    buffers = SampleBuffers.allocate(logits_RV, params)
    for launch in sample_launches(logits_RV, params, keys_R5, buffers):
        launch.run()
    return buffers.result


def sample(logits_RV: Tensor, params: SampleParams, keys_R5: Tensor) -> SampleResult:
    """Draw one token per row; `logits_RV` is not changed, and on a GPU nothing waits for the host.

    `keys_R5` (int64) keys the random numbers: seed, source, row, sample, position (`batchgen_kernels.philox`).
    """
    return (sample_triton if runs_on_triton(logits_RV) else sample_reference)(logits_RV, params, keys_R5)


class SampleSteps:
    """`sample` step after step for the same rows: each call draws the token after the one that the call before drew."""

    def __init__(self, params: SampleParams, keys_R5: Tensor) -> None:
        """`keys_R5` is of the first step, and is this object's from now on."""
        self._params = params
        self._keys_R5 = keys_R5
        self._positions_R = keys_R5[:, POSITION]

    def __call__(self, logits_RV: Tensor) -> SampleResult:
        """Draw the next token of each row; the result is valid until the next call."""
        result = sample(logits_RV, self._params, self._keys_R5)
        self._positions_R.add_(1)
        return result
