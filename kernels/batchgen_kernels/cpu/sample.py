"""sample, top_tokens and token_ranks on the CPU; formulas stand in the modules of those names one level up.

Legend: R rows, V vocabulary, N entries of a list of edits, K tokens kept per row, C tokens asked for per row.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from batchgen_kernels.cpu.library import dtype_code, library, pointer
from batchgen_kernels.sample_types import SampleParams, SampleResult
from batchgen_kernels.top_tokens import NO_EDITS, TokenRanks, TopTokens

_P, _I64, _I32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_EDITS = (
    "bias_starts", "bias_tokens", "bias_values", "count_starts", "count_tokens", "counts",
    "repetition", "presence", "frequency",
)  # fmt: skip


class _LogitsArgs(ctypes.Structure):
    """LogitsArgs of sample_args.h."""

    _fields_ = [
        ("logits", _P),
        ("stride", _I64),
        *((name, _I32) for name in ("rows", "vocabulary", "dtype", "num_threads")),
    ]


class _EditArgs(ctypes.Structure):
    """EditArgs of sample_args.h."""

    _fields_ = [(name, _P) for name in _EDITS]


class _SampleArgs(ctypes.Structure):
    """SampleArgs of sample_args.h."""

    _fields_ = [
        ("source", _LogitsArgs),
        ("edits", _EditArgs),
        *((name, _P) for name in ("temperature", "top_k", "top_p", "min_p", "keys", "token_ids", "logprobs", "ok")),
        ("num_later", _I64),
        ("greedy", _I32),
    ]


class _TopTokensArgs(ctypes.Structure):
    """TopTokensArgs of sample_args.h."""

    _fields_ = [
        ("source", _LogitsArgs),
        ("edits", _EditArgs),
        *((name, _P) for name in ("token_ids", "scores", "logprobs")),
        ("count", _I32),
    ]


class _TokenRanksArgs(ctypes.Structure):
    """TokenRanksArgs of sample_args.h."""

    _fields_ = [
        ("source", _LogitsArgs),
        *((name, _P) for name in ("token_ids", "logprobs", "ranks", "best_ids", "best_logprobs")),
        ("count", _I32),
        ("best_count", _I32),
    ]


def _check_logits(logits_RV: Tensor) -> Tensor:
    """Return fp32 or bf16 rows whose tokens are contiguous."""
    if logits_RV.dtype == torch.float16:
        logits_RV = logits_RV.float()
    dtype_code(logits_RV, "logits", (torch.float32, torch.bfloat16))
    return logits_RV if logits_RV.stride(1) == 1 else logits_RV.contiguous()


def _logits_args(logits_RV: Tensor) -> _LogitsArgs:
    dtype = dtype_code(logits_RV, "logits", (torch.float32, torch.bfloat16))
    return _LogitsArgs(logits_RV.data_ptr(), logits_RV.stride(0), *logits_RV.shape, dtype, torch.get_num_threads())


def _vector(x_R: Tensor | None, name: str, rows: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
    """Return one value per row, contiguous; ValueError where there is another number of them."""
    if x_R is None:
        return None
    if x_R.shape != (rows,):
        raise ValueError(f"{name} must be [{rows}], got {list(x_R.shape)}")
    return x_R.to(dtype).contiguous()


def _by_row(row_N: Tensor, *values_N: Tensor, rows: int) -> tuple[Tensor, ...]:
    """Return (starts [R + 1], values in the order of their rows); entries of row -1 are left out."""
    if len(row_N) > 1 and bool((row_N[1:] < row_N[:-1]).any()):
        order = row_N.argsort(stable=True)
        row_N, values_N = row_N[order], tuple(value[order] for value in values_N)
    starts = torch.searchsorted(row_N.contiguous(), torch.arange(rows + 1))
    return (starts, *(value.contiguous() for value in values_N))


class _Edits:
    """Edits as the kernels take them; holds the tensors for as long as their addresses are used."""

    def __init__(self, params: SampleParams, shape: tuple[int, int]) -> None:
        rows, vocabulary = shape
        self.tensors: dict[str, Tensor] = {}
        if params.bias is not None:
            row, token, value = params.bias
            entries = _by_row(row.long(), token.long(), value.float(), rows=rows)
            self.tensors.update(zip(_EDITS[:3], entries, strict=True))
        if params.counts is not None:
            row, token, count = params.counts
            entries = _by_row(row.long(), token.long(), count.int(), rows=rows)
            self.tensors.update(zip(_EDITS[3:6], entries, strict=True))
        for name in ("bias_tokens", "count_tokens"):
            tokens = self.tensors.get(name)
            if tokens is not None and len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
                raise ValueError(f"{name} must be below the vocabulary of {vocabulary}")
        for name in _EDITS[6:]:
            penalties = _vector(getattr(params, f"{name}_penalty_R"), f"{name}_penalty_R", rows)
            if penalties is not None:
                self.tensors[name] = penalties
        self.args = _EditArgs(**{name: tensor.data_ptr() for name, tensor in self.tensors.items()})


class SampleSteps:
    """Draws one token per row step after step; as `batchgen_kernels.sample.SampleSteps`.

    A step costs little beside the kernel: all is made ready for the first one.
    """

    def __init__(self, params: SampleParams, keys_R5: Tensor) -> None:
        rows = len(keys_R5)
        if keys_R5.shape != (rows, 5) or keys_R5.dtype != torch.int64:
            raise ValueError(f"keys_R5 must be int64 [R, 5], got {keys_R5.dtype} {list(keys_R5.shape)}")
        self._params = params
        self._vectors = {
            "temperature": _vector(params.temperature_R, "temperature_R", rows),
            "top_k": _vector(params.top_k_R, "top_k_R", rows, torch.int64),
            "top_p": _vector(params.top_p_R, "top_p_R", rows),
            "min_p": _vector(params.min_p_R, "min_p_R", rows),
            "keys": keys_R5.contiguous(),
        }
        self._result = SampleResult(
            torch.empty(rows, dtype=torch.int64), torch.empty(rows), torch.empty(rows, dtype=torch.bool)
        )
        self._shape = (rows, -1)
        token_ids, logprobs, ok = self._result
        self._args = _SampleArgs(
            token_ids=token_ids.data_ptr(),
            logprobs=logprobs.data_ptr(),
            ok=ok.data_ptr(),
            greedy=params.all_greedy,
            **{name: pointer(vector) for name, vector in self._vectors.items()},
        )

    def __call__(self, logits_RV: Tensor) -> SampleResult:
        """Draw the next token of each row; the result is valid until the next call."""
        logits_RV = _check_logits(logits_RV)
        if logits_RV.shape != self._shape:
            self._prepare_for(logits_RV.shape)
        args = self._args
        args.source = _logits_args(logits_RV)
        library().bg_sample(ctypes.byref(args))
        args.num_later += 1
        return self._result

    def _prepare_for(self, shape: tuple[int, ...]) -> None:
        rows = self._shape[0]
        if len(shape) != 2 or shape[0] != rows:
            raise ValueError(f"logits_RV must be [{rows}, V], got {list(shape)}")
        self._shape = (rows, shape[1])
        self._edits = _Edits(self._params, self._shape)
        self._args.edits = self._edits.args


def sample(logits_RV: Tensor, params: SampleParams, keys_R5: Tensor) -> SampleResult:
    """Draw one token per row; as `batchgen_kernels.sample.sample`."""
    return SampleSteps(params, keys_R5)(logits_RV)


def top_tokens(logits_RV: Tensor, count: int, edits: SampleParams = NO_EDITS) -> TopTokens:
    """Find the `count` best tokens of each row; as `batchgen_kernels.top_tokens.top_tokens`."""
    logits_RV = _check_logits(logits_RV)
    rows, vocabulary = logits_RV.shape
    count = min(count, vocabulary)
    held = _Edits(edits, (rows, vocabulary))
    found = TopTokens(torch.empty(rows, count, dtype=torch.int64), torch.empty(rows, count), torch.empty(rows, count))
    if count:
        args = _TopTokensArgs(_logits_args(logits_RV), held.args, *(tensor.data_ptr() for tensor in found), count)
        library().bg_top_tokens(ctypes.byref(args))
    return found


def token_ranks(logits_RV: Tensor, token_ids_RC: Tensor, count: int = 0) -> TokenRanks:
    """Rank given tokens, and find the `count` best; as `batchgen_kernels.top_tokens.token_ranks`."""
    logits_RV = _check_logits(logits_RV)
    token_ids = token_ids_RC.long().contiguous()
    if token_ids.dim() != 2 or len(token_ids) != len(logits_RV):
        raise ValueError(f"token_ids_RC must be [{len(logits_RV)}, C], got {list(token_ids.shape)}")
    if token_ids.numel() and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < logits_RV.shape[1]:
        raise ValueError(f"token_ids_RC must be below the vocabulary of {logits_RV.shape[1]}")
    rows, count = len(logits_RV), min(count, logits_RV.shape[1])
    found = TokenRanks(
        torch.empty(token_ids.shape),
        torch.empty(token_ids.shape, dtype=torch.int64),
        torch.empty(rows, count, dtype=torch.int64),
        torch.empty(rows, count),
    )
    pointers = (tensor.data_ptr() for tensor in (token_ids, *found))
    args = _TokenRanksArgs(_logits_args(logits_RV), *pointers, token_ids.shape[1], count)
    library().bg_token_ranks(ctypes.byref(args))
    return found
