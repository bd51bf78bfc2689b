// The C interface between the ctypes binding and the kernels, and the table that each processor level fills.
//
// Letters: T tokens, S sequences, H query heads, K kv heads, D head size of keys, Dv of values, G = H / K.
#pragma once

#include <cstddef>
#include <cstdint>

#include "elementwise_args.h"
#include "sample_args.h"

#if defined(__GNUC__)
#define BG_EXPORT extern "C" __attribute__((visibility("default")))
#else
#define BG_EXPORT extern "C"
#endif

// Contexts are cut into segments of this many tokens, counted from position 0; see segments.py.
constexpr int kSegmentTokens = 64;
// Rows (query, head) that are computed side by side, one per vector lane.
constexpr int kLanes = 16;

enum DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2 };

struct AttentionArgs {
  const void *q;          // [T, H, D], the last dimension contiguous
  const void *k_cache;    // [blocks, K, block_size, D] contiguous
  const void *v_cache;    // [blocks, K, block_size, Dv] contiguous
  const float *k_scales;  // [blocks, K, block_size], int8 caches only
  const float *v_scales;
  const int32_t *block_tables;  // [S, table_stride]
  const int32_t *query_starts;  // [S + 1]
  const int32_t *context_lens;  // [S]
  const float *sinks;           // [H] or null
  void *out;                    // [T, H, Dv] contiguous
  int64_t q_stride_t, q_stride_h;
  int64_t table_stride;
  int32_t num_sequences, num_heads, num_kv_heads, head_dim_k, head_dim_v, block_size;
  int32_t dtype, kv_dtype;
  int32_t window;  // 0: none
  int32_t share;   // 0: every sequence reads its own blocks even where they are shared
  float scale, softcap;  // softcap 0: none
  int32_t num_threads;
};

struct StoreArgs {
  const void *k;  // [T, K, D], last dimension contiguous
  const void *v;  // [T, K, Dv]
  void *k_cache, *v_cache;
  float *k_scales, *v_scales;  // int8 caches only
  const int64_t *slots;        // [T], -1: not stored
  int64_t k_stride_t, k_stride_h, v_stride_t, v_stride_h;
  int32_t num_tokens, num_kv_heads, head_dim_k, head_dim_v, block_size;
  int32_t dtype, kv_dtype;
  int32_t num_threads;
};

// Weights [N, K] are packed as [N / 32][K / 32][2][16 pairs of K][16 columns of N][2], both sizes padded with zeros: the
// B tiles of AMX, and the rows of the dot-product instructions, read from first to last. int8 weights likewise, with
// [K / 64] and quads.
constexpr int kPanelColumns = 32;
constexpr int kBlockDepth = 32;

struct LinearArgs {
  const void *x;        // [M, K] bf16, the last dimension contiguous
  const void *packed;
  const float *bias;    // [N] or null
  const float *column_scales;  // [N]: the weights are int8; null: bf16
  const int32_t *column_offsets;  // [N], 128 times the sum of the int8 weights over K
  const void *residual;  // [M, N] bf16 contiguous, added to the rounded result where that is bf16 and not gated; or null
  void *out;            // [M, N] contiguous, bf16 or fp32; [M, gated] bf16; may be residual
  int64_t x_stride;
  int32_t m, n, k;
  int32_t out_dtype;
  int32_t gated;  // 0, or how many outputs silu(gate) * up has: each panel then holds sixteen gates, then their ups
  int32_t num_threads;
  const LinearArgs *next;  // the product after this one, whose first weights are fetched at the end of this; or null
};

// A decoder layer of a stack: h += attention(norm(h)), then h += mlp(norm(h)), in bf16. Its products bring their weights, biases
// and sizes; rows, results and threads are the step's.
struct DecoderLayerArgs {
  LinearArgs qkv, attention_out, gate_up, down;
  const void *attention_norm, *mlp_norm;  // [E] of norm_dtype
  void *k_cache, *v_cache;                // as in AttentionArgs
  float *k_scales, *v_scales;
  float attention_eps, mlp_eps, scale;
  int32_t norm_dtype, kv_dtype;
  int32_t num_heads, num_kv_heads, head_dim, block_size;
  int32_t window;
};

// What all layers of a step have in common.
struct DecoderStepArgs {
  const void *cos, *sin;        // [P, rotated] of angle_dtype, contiguous
  const int64_t *positions;     // [T], the row of cos and sin of each token; null: its own
  const int64_t *slots;         // as in StoreArgs
  const int32_t *block_tables;  // as in AttentionArgs
  const int32_t *query_starts;
  const int32_t *context_lens;
  int64_t table_stride;
  int64_t step;  // another number for every step
  int32_t num_tokens, num_sequences;
  int32_t rotated, angle_dtype;
  int32_t num_threads;
};

// A model around its layers: rows of an embedding go in, and the logits of wanted tokens come out of norm and head.
struct DecoderModelArgs {
  const DecoderLayerArgs *const *layers;
  const void *embedding;  // [V, E] bf16 contiguous
  const void *norm;       // [E] of norm_dtype
  LinearArgs head;
  int64_t num_embeddings;
  float eps;
  int32_t norm_dtype, num_layers;
};

// Of each sequence of the step some neighbouring tokens, flattened.
struct DecoderModelStepArgs {
  const int32_t *token_ids;     // [T]
  const int32_t *starts;        // [S], position of the first
  const int32_t *counts;        // [S], how many; together T
  const int32_t *wanted;        // [W], flattened tokens
  const int32_t *block_tables;  // as in AttentionArgs
  const void *cos, *sin;        // [P, rotated] of angle_dtype, contiguous
  float *logits;                // [W, V] contiguous
  int64_t table_stride, num_positions;  // P
  int64_t step;                 // another number for every step
  int32_t num_tokens, num_sequences, num_wanted;
  int32_t rotated, angle_dtype;
  int32_t num_threads;
};

enum DecoderStatus : int32_t { kDone = 0, kNoSuchToken = 1, kNoSuchPosition = 2, kNoSuchChunk = 3 };

struct AttentionPlan;

// What one processor level provides.
struct KernelTable {
  const char *name;
  void (*attention)(const AttentionArgs &, const AttentionPlan &);
  void (*store_kv)(const StoreArgs &);
  void (*linear)(const LinearArgs &);
  void (*sample)(const SampleArgs &);
  void (*top_tokens)(const TopTokensArgs &);
  void (*token_ranks)(const TokenRanksArgs &);
  void (*rms_norm)(const RmsNormArgs &);
  void (*silu_mul)(const SiluMulArgs &);
  void (*rotary)(const RotaryArgs &);
  void (*rotate_and_store)(const RotaryArgs &, const StoreArgs &);
};

// hidden is [T, E] bf16 contiguous, changed in place; `after` is the product after them, or null.
void run_decoder_layers(const KernelTable &kernels, const DecoderLayerArgs *const *layers, int num_layers,
                        const LinearArgs *after, void *hidden, const DecoderStepArgs &step);
// Where a token id has no embedding, a position no angles, or counts and wanted tokens do not fit, nothing is computed.
DecoderStatus run_decoder_model(const KernelTable &kernels, const DecoderModelArgs &model,
                                const DecoderModelStepArgs &step);
