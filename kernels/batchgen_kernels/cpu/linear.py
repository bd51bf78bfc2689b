"""Matrix products over packed weights: a row's bits do not depend on the rows beside it or on the threads.

Legend: M rows, K inputs, N outputs, I gated outputs.
    bf16: out[m, n] = sum_k x[m, k] weight[n, k] + bias[n], summed in fp32 over ascending k
    int8: weight[n] ~ q[n] * s[n], x[m] ~ p[m] * t[m];  out[m, n] = (sum_k p[m, k] q[n, k]) t[m] s[n] + bias[n]
    gated: silu(gate) * up of two such products, each rounded to bf16 first
"""

from __future__ import annotations

import ctypes
from threading import Lock

import torch
from torch import Tensor
from torch.nn.functional import pad

from batchgen_kernels.cpu.library import DTYPE_CODES, dtype_code, empty_in_huge_pages, library, pointer

_OUT_DTYPES = (torch.bfloat16, torch.float32)
_GATES = 16
"""Gates that lie together in a panel, followed by their ups."""
_PANEL = 32
"""Outputs of a panel, in two halves."""
_BLOCK_BYTES = 64
"""Of an output's weights; in words of four bytes, which stay together."""
_MAX_INPUTS_INT8 = 65536
"""More could overflow the int32 sums."""
_CHUNK_BYTES = 64 << 20
"""Above what an allocator keeps for itself."""


class LinearArgs(ctypes.Structure):
    """LinearArgs of api.h."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("x", "packed", "bias", "column_scales", "column_offsets", "residual", "out")
        ),
        ("x_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("m", "n", "k", "out_dtype", "gated", "num_threads")),
        ("next", ctypes.c_void_p),
    ]


class _Room:
    """Memory in huge pages for what is packed, one matrix after the other: most are smaller than such a page.

    Chunks are large enough to come from the system untouched, and go back to it with the last matrix in them.
    """

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)
        self._lock = Lock()

    def take(self, num_bytes: int) -> Tensor:
        """Bytes that begin at a cache line, so that tiles are read whole."""
        size = -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
        with self._lock:
            if size > len(self._rest):
                self._rest = empty_in_huge_pages([max(size, _CHUNK_BYTES)], torch.uint8)
            taken, self._rest = self._rest[:num_bytes], self._rest[size:]
        return taken


_room = _Room()


def _pack(weight_NK: Tensor) -> Tensor:
    """Return the packed bytes of a bf16 or int8 weight."""
    outputs, inputs = weight_NK.shape
    per_block = _BLOCK_BYTES // weight_NK.element_size()
    missing = (-inputs % per_block, -outputs % _PANEL)
    weight = pad(weight_NK, (0, missing[0], 0, missing[1])) if any(missing) else weight_NK.contiguous()
    packed = _room.take(weight.nbytes)
    # The order of api.h is a transposition, which torch does on all threads.
    words = weight.view(torch.int32).view(len(weight) // _PANEL, 2, _PANEL // 2, -1, _BLOCK_BYTES // 4)
    in_order = words.permute(0, 3, 1, 4, 2)
    packed.view(torch.int32).view(in_order.shape).copy_(in_order)
    return packed


def quantize_weight(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return round(weight / scale) in int8 and the fp32 scale_N = max |weight| / 127 of each row."""
    weight = weight_NK.float()
    scale_N = weight.abs().amax(1) / 127.0
    steps = weight / torch.where(scale_N > 0, scale_N, 1.0).unsqueeze(1)
    return steps.round().to(torch.int8), scale_N


def _interleave(gate_IK: Tensor, up_IK: Tensor) -> Tensor:
    """Return the rows of both weights in turns of sixteen, padded with zeros to whole turns."""
    halves = (gate_IK, up_IK)
    if missing := -len(gate_IK) % _GATES:
        halves = (pad(gate_IK, (0, 0, 0, missing)), pad(up_IK, (0, 0, 0, missing)))
    return torch.stack([half.reshape(-1, _GATES, half.shape[1]) for half in halves], 1).flatten(0, 2)


class PackedLinear:
    """x [..., K] -> [..., N] over a weight [N, K], packed once; the weight itself is not kept.

    The weight is bf16 (fp32 or bf16 with `int8`, which quantizes it per output, and x per row).
    """

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None = None, *, int8: bool = False) -> None:
        dtype_code(weight_NK, "weight", (torch.bfloat16, torch.float32) if int8 else (torch.bfloat16,))
        self.out_features, self.in_features = weight_NK.shape
        if bias_N is not None and bias_N.shape != (self.out_features,):
            raise ValueError(f"bias must be [{self.out_features}], got {list(bias_N.shape)}")
        self._bias = None if bias_N is None else bias_N.detach().float().contiguous()
        self._columns, self._gated = self.out_features, 0
        self._store(weight_NK.detach(), int8)

    def _store(self, weight_NK: Tensor, int8: bool) -> None:
        self._scales = self._offsets = None
        if int8:
            if self.in_features > _MAX_INPUTS_INT8:
                raise ValueError(f"int8 products take at most {_MAX_INPUTS_INT8} inputs, got {self.in_features}")
            weight_NK, self._scales = quantize_weight(weight_NK)
            self._offsets = 128 * weight_NK.sum(1, dtype=torch.int32)
        self._packed = _pack(weight_NK)

    def prepared(self) -> LinearArgs:
        """Its arguments without those of a call: rows, result and threads."""
        return LinearArgs(
            packed=self._packed.data_ptr(),
            bias=pointer(self._bias),
            column_scales=pointer(self._scales),
            column_offsets=pointer(self._offsets),
            n=self._columns,
            k=self.in_features,
            gated=self._gated,
        )

    def __call__(self, x: Tensor, *, out_dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None) -> Tensor:
        """Return x W^T + b for bf16 x, rounded once to `out_dtype` (bf16 or fp32); `out` is contiguous [..., N]."""
        dtype_code(x, "x", (torch.bfloat16,))
        if x.shape[-1] != self.in_features:
            raise ValueError(f"x must end in {self.in_features} features, got {list(x.shape)}")
        shape = (*x.shape[:-1], self.out_features)
        if out is None:
            out = x.new_empty(shape, dtype=out_dtype)
        elif out.shape != shape or not out.is_contiguous():
            raise ValueError(f"out must be contiguous {list(shape)}")
        dtype_code(out, "out", _OUT_DTYPES[:1] if self._gated else _OUT_DTYPES)
        rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, self.in_features).contiguous()
        args = self.prepared()
        args.x, args.x_stride, args.m = rows.data_ptr(), rows.stride(0), len(rows)
        args.out, args.out_dtype, args.num_threads = out.data_ptr(), DTYPE_CODES[out.dtype], torch.get_num_threads()
        library().bg_linear(ctypes.byref(args))
        return out


class PackedGatedLinear(PackedLinear):
    """x [..., K] -> silu(x gate^T) * (x up^T) [..., I] in bf16: the bits of silu_mul after two PackedLinear."""

    def __init__(self, gate_IK: Tensor, up_IK: Tensor, *, int8: bool = False) -> None:
        dtype_code(gate_IK, "gate", (torch.bfloat16, torch.float32) if int8 else (torch.bfloat16,))
        if gate_IK.shape != up_IK.shape or gate_IK.dtype != up_IK.dtype:
            raise ValueError(f"gate {list(gate_IK.shape)} and up {list(up_IK.shape)} must agree in shape and dtype")
        self.out_features, self.in_features = gate_IK.shape
        weight = _interleave(gate_IK.detach(), up_IK.detach())
        self._bias = None
        self._columns, self._gated = len(weight), self.out_features
        self._store(weight, int8)
