// Arguments of the row-wise kernels. Tensors hold fp32 or bf16 (`dtype`); only their last dimension must be contiguous.
#pragma once

#include <cstdint>

struct RmsNormArgs {
  const void *x;         // [T, E]
  const void *residual;  // [T, E] or null
  const void *weight;    // [E], of weight_dtype
  void *out, *hidden;    // [T, E] contiguous; hidden is x + residual, null without one
  int64_t x_stride, residual_stride;
  int32_t num_tokens, num_features;
  int32_t dtype, weight_dtype;
  float eps;
  int32_t num_threads;
};

struct SiluMulArgs {
  const void *gate_up;  // [T, 2 I], gate first
  void *out;            // [T, I] contiguous
  int64_t stride;
  int32_t num_tokens, num_inner;
  int32_t dtype;
  int32_t num_threads;
};

struct RotaryArgs {
  const void *x;             // [T, H, D]
  const void *cos, *sin;     // [P, R], of angle_dtype
  const int64_t *positions;  // [T], the row of cos and sin of each token; null: its own
  void *out;                 // [T, H, D], may be x itself
  int64_t x_stride_t, x_stride_h, out_stride_t, out_stride_h, cos_stride, sin_stride;
  int32_t num_tokens, num_heads, head_dim, rotated;
  int32_t dtype, angle_dtype;
  int32_t num_threads;
};
