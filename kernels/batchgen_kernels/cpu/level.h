// One processor level: the kernels compiled for BG_LEVEL into BG_NAMESPACE. Each level_*.cpp includes this once and is
// compiled with the flags that setup.py gives it.
//
// Standard headers come first: nothing of theirs may be compiled for a processor that other files do not require, so
// the kernels only use what is inlined or lies in the level's own namespace.

#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "api.h"
#include "attention_plan.h"
#include "scratch.h"

namespace BG_NAMESPACE {

static inline uint16_t round_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (value != value) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#include "vec.h"
#include "pairs.h"
#if BG_LEVEL >= 4
#include "amx.h"
static inline void begin_tiles() {
  const TileShape shape;
  tile_configure(&shape);
}
static inline void end_tiles() { tile_release(); }
#else
static inline void begin_tiles() {}
static inline void end_tiles() {}
#endif
#include "attention_fetch.h"
#include "attention_segment.h"
#include "attention_tile_float.h"
#if BG_LEVEL >= 3
#include "transpose.h"
#include "cache_rows.h"
#if BG_LEVEL >= 4
#include "pair_products_amx.h"
#else
#include "pair_products_dot.h"
#endif
#include "attention_keys.h"
#include "attention_tile_bf16.h"
#endif
#include "attention.h"
#include "cache_ops.h"
#include "elementwise.h"
#include "linear_products.h"
#include "linear.h"
#include "logits_row.h"
#include "thresholds.h"
#include "draw.h"
#include "sample.h"

extern const KernelTable kTable;
const KernelTable kTable = {BG_NAME, attention, store_kv, linear, sample, top_tokens, token_ranks,
                            rms_norm, silu_mul, rotary, rotate_and_store};

}  // namespace BG_NAMESPACE
