"""Matrix products over packed bf16 weights: a row's bits do not depend on the rows beside it or on the threads.

Legend: M rows, K inputs, N outputs.  out[m, n] = sum_k x[m, k] weight[n, k] + bias[n], summed in fp32 over ascending k.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from batchgen_kernels.cpu.library import DTYPE_CODES, dtype_code, library, pointer

_OUT_DTYPES = (torch.bfloat16, torch.float32)


class _LinearArgs(ctypes.Structure):
    """LinearArgs of api.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "packed", "bias", "out")),
        ("x_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("m", "n", "k", "out_dtype", "num_threads")),
    ]


class PackedLinear:
    """x [..., K] -> [..., N] over a bf16 weight [N, K], packed once; the weight itself is not kept."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> None:
        dtype_code(weight_NK, "weight", (torch.bfloat16,))
        self.out_features, self.in_features = weight_NK.shape
        if bias_N is not None and bias_N.shape != (self.out_features,):
            raise ValueError(f"bias must be [{self.out_features}], got {list(bias_N.shape)}")
        weight = weight_NK.detach().contiguous()
        size = (ctypes.c_int32(self.out_features), ctypes.c_int32(self.in_features))
        count = library().bg_linear_packed_size
        count.restype = ctypes.c_int64
        # Aligned to a huge page's granularity by the allocator or not, tiles are read at cache-line borders.
        storage = torch.empty(count(*size) + 32, dtype=torch.bfloat16)
        offset = -storage.data_ptr() % 64 // 2
        self._packed = storage[offset : offset + count(*size)]
        self._bias = None if bias_N is None else bias_N.detach().float().contiguous()
        address, stride = ctypes.c_void_p(weight.data_ptr()), ctypes.c_int64(weight.stride(0))
        library().bg_linear_pack(address, stride, *size, ctypes.c_void_p(self._packed.data_ptr()))

    def __call__(self, x: Tensor, *, out_dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None) -> Tensor:
        """Return x W^T + b, rounded once to `out_dtype` (bf16 or fp32); `out` is contiguous [..., N]."""
        dtype_code(x, "x", (torch.bfloat16,))
        if x.shape[-1] != self.in_features:
            raise ValueError(f"x must end in {self.in_features} features, got {list(x.shape)}")
        shape = (*x.shape[:-1], self.out_features)
        if out is None:
            out = x.new_empty(shape, dtype=out_dtype)
        elif out.shape != shape or not out.is_contiguous():
            raise ValueError(f"out must be contiguous {list(shape)}")
        dtype_code(out, "out", _OUT_DTYPES)
        rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, self.in_features).contiguous()
        args = _LinearArgs(
            rows.data_ptr(), self._packed.data_ptr(), pointer(self._bias), out.data_ptr(), rows.stride(0), len(rows),
            self.out_features, self.in_features, DTYPE_CODES[out.dtype], torch.get_num_threads(),
        )  # fmt: skip
        library().bg_linear(ctypes.byref(args))
        return out
