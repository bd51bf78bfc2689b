"""rotary: reference against transformers, Triton kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from batchgen_kernels.rotary import rotary_reference, rotary_triton
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests.kernels.dtypes import FLOATS, assert_within_rounding

CASES = [(0, 2, 1, 8, 8), (1, 1, 1, 2, 2), (3, 9, 3, 64, 64), (2, 4, 4, 96, 96), (5, 6, 2, 80, 32)]


def angles(num_tokens: int, rotated: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of both halves, as transformers passes them."""
    half = torch.rand(num_tokens, rotated // 2) * 6.28
    both = torch.cat((half, half), dim=-1)
    return both.cos(), both.sin()


def heads(num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Heads as a strided part of a merged projection."""
    return torch.randn(num_tokens, num_heads + 2, head_dim).to(dtype)[:, 1:-1]


@pytest.mark.parametrize(("tokens", "num_q", "num_k", "head_dim", "rotated"), CASES)
def test_reference_equals_transformers(tokens: int, num_q: int, num_k: int, head_dim: int, rotated: int) -> None:
    q, k = heads(tokens, num_q, head_dim, torch.float32), heads(tokens, num_k, head_dim, torch.float32)
    cos, sin = angles(tokens, rotated)
    q_out, k_out = rotary_reference(q, k, cos, sin)
    expected = apply_rotary_pos_emb(
        q[None, ..., :rotated].transpose(1, 2), k[None, ..., :rotated].transpose(1, 2), cos[None], sin[None]
    )
    for out, turned, whole in ((q_out, expected[0], q), (k_out, expected[1], k)):
        assert_within_rounding(out[..., :rotated], turned[0].transpose(0, 1))
        assert torch.equal(out[..., rotated:], whole[..., rotated:])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("tokens", "num_q", "num_k", "head_dim", "rotated"), CASES)
def test_triton_equals_reference(
    tokens: int, num_q: int, num_k: int, head_dim: int, rotated: int, dtype: torch.dtype
) -> None:
    q, k = heads(tokens, num_q, head_dim, dtype), heads(tokens, num_k, head_dim, dtype)
    cos, sin = (x.to(dtype) for x in angles(tokens, rotated))
    for out, expected in zip(rotary_triton(q, k, cos, sin), rotary_reference(q, k, cos, sin), strict=True):
        assert_within_rounding(out, expected)
