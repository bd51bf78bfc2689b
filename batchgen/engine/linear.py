"""Matrix products whose rows do not know their neighbours.

torch's own products choose another kernel, and so another order of summation, for other numbers of rows and threads.
These keep one order, so that a token's hidden state is the same bits in every batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from batchgen_kernels import cpu
from batchgen_kernels.cpu.linear import quantize_weight
from torch import nn
from transformers.pytorch_utils import Conv1D

from batchgen.errors import ModelError

MIN_ROWS = 8
"""oneDNN's packed fp32 product is the same for every number of rows from 2 up; short inputs are padded to this many."""

ROUNDING_STEPS = 8
"""A packed product may differ from torch's by this many roundings of the sum of its terms' magnitudes."""


Product = Callable[[torch.Tensor], torch.Tensor]
"""x [T, K] -> x W^T + b [T, N]; each row of the result depends on that row of x alone."""


@dataclass(frozen=True, slots=True)
class KernelProduct:
    """A product of the C++ kernels, in `out_dtype`."""

    packed: cpu.PackedLinear
    out_dtype: torch.dtype

    def __call__(self, rows_TK: torch.Tensor) -> torch.Tensor:
        """[T, K] to [T, N]."""
        return self.packed(rows_TK, out_dtype=self.out_dtype)


class PackedLinear(nn.Module):
    """x [..., K] -> x W^T + b [..., N] over a weight [N, K] that is packed once."""

    def __init__(self, product: Product, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self._product = product

    @property
    def kernel(self) -> cpu.PackedLinear | None:
        """The packed weight, where the product is one of the C++ kernels."""
        return self._product.packed if isinstance(self._product, KernelProduct) else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product, in the dtype it was packed for."""
        return self._product(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


def pack_linears(model: nn.Module, head: nn.Module | None = None, int8: bool = False) -> int:
    """Replace every linear layer of the model by its packed twin, checked against it; returns how many.

    `head` is the layer that makes logits: its result stays fp32, so that near-ties are not rounded into ties, and its
    weights are never quantized. Raises ModelError where a twin computes something else.
    """
    found: list[tuple[nn.Module, str, Any]] = [
        (parent, name, child) for parent in model.modules() for name, child in parent.named_children()
    ]
    count = 0
    for parent, name, layer in found:
        # Subclasses of nn.Linear may compute something else.
        if type(layer) is not nn.Linear and type(layer) is not Conv1D:
            continue
        weight = layer.weight.detach()
        if type(layer) is Conv1D:
            weight = weight.T.contiguous()
        bias = None if layer.bias is None else layer.bias.detach()
        out_dtype = torch.float32 if layer is head else None
        product = checked_product(
            f"{type(parent).__name__}.{name}", weight, bias, out_dtype, int8=int8 and layer is not head
        )
        setattr(parent, name, PackedLinear(product, weight.shape[1], weight.shape[0]))
        count += 1
    return count


def checked_product(
    name: str,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None = None,
    *,
    int8: bool = False,
) -> Product:
    """The packed product over weight [N, K], in `out_dtype` or the weight's; ModelError unless it equals torch's.

    With `int8` the weight is quantized per output and x per row; the kernels are then required.
    """
    if int8:
        product: Product = KernelProduct(cpu.PackedLinear(weight, bias, int8=True), out_dtype or weight.dtype)
        _check_int8(name, product, weight, bias)
    else:
        product = packed_product(weight, bias, out_dtype)
        _check(name, product, weight, bias)
    return product


def packed_product(weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None = None) -> Product:
    """The same unchecked, for those who compare what they build of it as a whole.

    bf16 goes through the C++ kernel where it is built: on processors with AMX, oneDNN's bf16 product does depend on
    the number of rows. fp32 goes through oneDNN.
    """
    if weight.dtype == torch.bfloat16 and cpu.is_available():
        return KernelProduct(cpu.PackedLinear(weight, bias), out_dtype or weight.dtype)
    return _onednn_product(weight, bias, out_dtype or weight.dtype)


def _onednn_product(weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)

    def product(rows_TK: torch.Tensor) -> torch.Tensor:
        num_rows = len(rows_TK)
        if num_rows < MIN_ROWS:
            rows_TK = nn.functional.pad(rows_TK, (0, 0, 0, MIN_ROWS - num_rows))
        out_TN: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows_TK.contiguous(), packed, bias, "none", [], "")
        return out_TN[:num_rows].to(out_dtype)

    return product


@torch.inference_mode()
def _check(name: str, product: Product, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    x = _sample_rows(weight)
    eps = torch.finfo(weight.dtype).eps
    # Rounded once to the weight's dtype, and so taken for a little less: a copy of the head in fp32 takes much longer.
    magnitude = nn.functional.linear(x.abs(), weight.abs()).float().clamp(max=torch.finfo(weight.dtype).max) * (
        1.0 - eps
    )
    allowed = ROUNDING_STEPS * eps * (magnitude + 1.0)
    _compare(name, product(x), nn.functional.linear(x, weight, bias), allowed)


@torch.inference_mode()
def _check_int8(name: str, product: Product, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Against the product of the integers, which float64 holds exactly, times both scales: one rounding apart."""
    x = _sample_rows(weight)
    quantized_NK, scale_N = quantize_weight(weight)
    top_M1 = x.float().abs().amax(1, keepdim=True)
    # Divided in full, as the kernel does: torch makes 127.0 / x of a reciprocal and a product.
    steps_MK = (x.float() * (torch.full_like(top_M1, 127.0) / top_M1)).round()
    expected = (steps_MK.double() @ quantized_NK.double().T).float() * (top_M1 / 127.0) * scale_N
    if bias is not None:
        expected += bias.float()
    _compare(
        name, product(x), expected, torch.finfo(weight.dtype).eps * expected.abs() + torch.finfo(torch.float32).eps
    )


def _sample_rows(weight: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1.0, 1.0, 3 * weight.shape[1]).sin().view(3, -1).to(weight.dtype)


def _compare(name: str, actual: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor) -> None:
    difference = (actual.float() - expected.float()).abs()
    if not bool((difference <= allowed).all()):
        raise ModelError(
            f"{name}: the packed product differs from torch's by {difference.max().item():.3g}; this is a bug of "
            "batchgen or of the processor's kernels, please report it"
        )
