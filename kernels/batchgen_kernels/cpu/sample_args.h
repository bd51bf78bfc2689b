// What the sampling kernels take. Part of api.h.
//
// Letters: R rows, V vocabulary, N entries of a list of edits, K tokens kept per row, C tokens asked for per row.
#pragma once

#include <cstdint>

// Tokens per group of a draw; GROUP_TOKENS of sample_types.py.
constexpr int kGroupTokens = 256;

struct LogitsArgs {
  const void *logits;  // [R, V] fp32 or bf16, the last dimension contiguous
  int64_t stride;
  int32_t rows, vocabulary, dtype;
  int32_t num_threads;
};

// Entries of row r are [starts[r], starts[r + 1]); null where there are none.
struct EditArgs {
  const int64_t *bias_starts, *bias_tokens;
  const float *bias_values;
  const int64_t *count_starts, *count_tokens;
  const int32_t *counts;
  const float *repetition, *presence, *frequency;  // [R] or null
};

struct SampleArgs {
  LogitsArgs in;
  EditArgs edits;
  const float *temperature;  // [R] or null, as the next three
  const int64_t *top_k;
  const float *top_p, *min_p;
  const int64_t *keys;  // [R, 5]
  int64_t *token_ids;   // [R], as the next two
  float *logprobs;
  uint8_t *ok;
  int64_t num_later;  // added to the positions in the keys
  int32_t greedy;
};

struct TopTokensArgs {
  LogitsArgs in;
  EditArgs edits;
  int64_t *token_ids;  // [R, K], as the next two
  float *scores, *logprobs;
  int32_t count;  // K
};

struct TokenRanksArgs {
  LogitsArgs in;
  const int64_t *token_ids;  // [R, C]
  float *logprobs;           // [R, C]
  int64_t *ranks;            // [R, C]
  int64_t *best_ids;         // [R, K]
  float *best_logprobs;      // [R, K]
  int32_t count, best_count; // C, K
};
