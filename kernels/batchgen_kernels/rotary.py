"""rotary: rotary position embedding of queries and keys, half-split form.

Legend: T tokens, H query heads, K key heads, D head size, R rotated features (R <= D, the rest pass through).
    x1, x2 = halves of x[:R];  out = (x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2)
Computed in fp32 and rounded once. Su et al., https://arxiv.org/abs/2104.09864.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchgen_kernels.launch import Launch, jit, next_power_of_2, runs_on_triton, tl


def _rotate(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    rotated = cos_TR.shape[-1]
    x1, x2 = x_THD[..., :rotated].float().chunk(2, dim=-1)
    cos1, cos2 = cos_TR.float().unsqueeze(1).chunk(2, dim=-1)
    sin1, sin2 = sin_TR.float().unsqueeze(1).chunk(2, dim=-1)
    turned = torch.cat((x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2), dim=-1).to(x_THD.dtype)
    return turned if rotated == x_THD.shape[-1] else torch.cat((turned, x_THD[..., rotated:]), dim=-1)


def rotary_reference(q_THD: Tensor, k_TKD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate in torch; see `rotary`."""
    return _rotate(q_THD, cos_TR, sin_TR), _rotate(k_TKD, cos_TR, sin_TR)


@jit
def _rotate_heads(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    head_stride: int,
    num_heads: tl.constexpr,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    HEAD_DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr,
) -> None:
    """Rotate all heads of one token; the pointers stand at the token's first feature."""
    half: tl.constexpr = ROTATED // 2
    head = tl.arange(0, BLOCK_H)[:, None]
    feature = tl.arange(0, BLOCK_R)[None, :]
    turned = feature < half
    inside = (head < num_heads) & turned
    cos1 = tl.load(cos_ptr + feature, mask=turned, other=0.0).to(tl.float32)
    sin1 = tl.load(sin_ptr + feature, mask=turned, other=0.0).to(tl.float32)
    cos2 = tl.load(cos_ptr + half + feature, mask=turned, other=0.0).to(tl.float32)
    sin2 = tl.load(sin_ptr + half + feature, mask=turned, other=0.0).to(tl.float32)
    x1 = tl.load(x_ptr + head * head_stride + feature, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + head * head_stride + half + feature, mask=inside, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + head * HEAD_DIM + feature, (x1 * cos1 - x2 * sin1).to(dtype), mask=inside)
    tl.store(out_ptr + head * HEAD_DIM + half + feature, (x2 * cos2 + x1 * sin2).to(dtype), mask=inside)
    if ROTATED < HEAD_DIM:
        rest = ROTATED + tl.arange(0, BLOCK_REST)[None, :]
        inside = (head < num_heads) & (rest < HEAD_DIM)
        passed = tl.load(x_ptr + head * head_stride + rest, mask=inside)
        tl.store(out_ptr + head * HEAD_DIM + rest, passed, mask=inside)


@jit
def _rotary_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    q_out_ptr: tl.tensor,
    k_out_ptr: tl.tensor,
    q_stride: int,
    q_head_stride: int,
    k_stride: int,
    k_head_stride: int,
    cos_stride: int,
    sin_stride: int,
    NUM_Q: tl.constexpr,
    NUM_K: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr,
) -> None:
    """Rotate one token's queries (second grid index 0) or keys (1)."""
    token = tl.program_id(0).to(tl.int64)
    cos_ptr += token * cos_stride
    sin_ptr += token * sin_stride
    if tl.program_id(1) == 0:
        q_ptr += token * q_stride
        q_out_ptr += token * (NUM_Q * HEAD_DIM)
        _rotate_heads(
            q_ptr, q_out_ptr, q_head_stride, NUM_Q, cos_ptr, sin_ptr, HEAD_DIM, ROTATED, BLOCK_Q, BLOCK_R, BLOCK_REST
        )
    else:
        k_ptr += token * k_stride
        k_out_ptr += token * (NUM_K * HEAD_DIM)
        _rotate_heads(
            k_ptr, k_out_ptr, k_head_stride, NUM_K, cos_ptr, sin_ptr, HEAD_DIM, ROTATED, BLOCK_K, BLOCK_R, BLOCK_REST
        )


def rotary_launch(q_THD: Tensor, k_TKD: Tensor, cos_TR: Tensor, sin_TR: Tensor, q_out: Tensor, k_out: Tensor) -> Launch:
    """Describe the launch: one program per token's queries and one per token's keys; only features must be dense."""
    num_tokens, num_q, head_dim = q_THD.shape
    rotated, num_k = cos_TR.shape[-1], k_TKD.shape[1]
    return Launch(
        _rotary_kernel,
        (num_tokens, 2),
        {
            "q_ptr": q_THD,
            "k_ptr": k_TKD,
            "cos_ptr": cos_TR,
            "sin_ptr": sin_TR,
            "q_out_ptr": q_out,
            "k_out_ptr": k_out,
            "q_stride": q_THD.stride(0),
            "q_head_stride": q_THD.stride(1),
            "k_stride": k_TKD.stride(0),
            "k_head_stride": k_TKD.stride(1),
            "cos_stride": cos_TR.stride(0),
            "sin_stride": sin_TR.stride(0),
        },
        {
            "NUM_Q": num_q,
            "NUM_K": num_k,
            "HEAD_DIM": head_dim,
            "ROTATED": rotated,
            "BLOCK_Q": next_power_of_2(num_q),
            "BLOCK_K": next_power_of_2(num_k),
            "BLOCK_R": next_power_of_2(max(1, rotated // 2)),
            "BLOCK_REST": next_power_of_2(max(1, head_dim - rotated)),
        },
        num_warps=min(16, max(1, next_power_of_2(num_q * head_dim) // 1024)),
    )


def rotary_triton(q_THD: Tensor, k_TKD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate by the Triton kernel; see `rotary`."""
    q_out = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    k_out = torch.empty(k_TKD.shape, dtype=k_TKD.dtype, device=k_TKD.device)
    rotary_launch(q_THD, k_TKD, cos_TR, sin_TR, q_out, k_out).run()
    return q_out, k_out


def rotary(q_THD: Tensor, k_TKD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> tuple[Tensor, Tensor]:
    """Return rotated copies of q and k; `cos_TR` and `sin_TR` hold the angles of each token for all R features."""
    if runs_on_triton(q_THD):
        return rotary_triton(q_THD, k_TKD, cos_TR, sin_TR)
    return rotary_reference(q_THD, k_TKD, cos_TR, sin_TR)
