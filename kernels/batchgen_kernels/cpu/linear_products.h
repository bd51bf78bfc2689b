// Some rows times one panel of packed weights, bf16 or int8. Both kinds are read in blocks of 64 bytes of a row and of
// 2048 bytes of weights; each sum runs over K from first to last (int8 sums are exact anyway).
// Included once per level, inside that level's namespace, after pairs.h.

// Rows that meet a panel at a time; their sums are [kLinearRows, kPanelColumns] of fp32 or int32.
constexpr int kLinearRows = 32;
constexpr int kRowBlockBytes = 64;
constexpr int kWeightBlockBytes = kRowBlockBytes * kPanelColumns;

struct LinearRows {
  const char *x;  // zero-padded to whole blocks, and at level 4 to whole tiles of rows
  int64_t stride;
  int count;
};

// What is fetched into the second cache meanwhile: the next panel, shared out over the blocks of this one.
struct Ahead {
  const char *at;
  int lines_per_block;
  void step() {
    for (int i = 0; i < lines_per_block; ++i, at += 64) __builtin_prefetch(at, 0, 2);
  }
};

#if BG_LEVEL >= 4

constexpr int kRowStep = 16;

template <int T, bool stream> static inline void load_operand(const void *from, size_t stride_bytes) {
  stream ? tile_stream<T>(from, stride_bytes) : tile_load<T>(from, stride_bytes);
}
template <bool int8, int C, int A, int B> static inline void tile_dot() {
  int8 ? tile_dot_int8<C, A, B>() : tile_dot_bf16<C, A, B>();
}

// Rows 0 to 15, and 16 to 31 where `second`; the operand that meets no other soon is streamed.
template <bool int8, bool second, bool stream_weights, class Before>
static inline void multiply_panel(const LinearRows &rows, const char *panel, int num_blocks, Ahead ahead, Before &before,
                                  float *sums) {
  const size_t stride = size_t(rows.stride);
  const char *top = rows.x, *bottom = rows.x + 16 * rows.stride;
  tile_zero<0>(), tile_zero<1>();
  if (second) tile_zero<2>(), tile_zero<3>();
  for (int block = 0; block < num_blocks; ++block) {
    ahead.step();
    load_operand<6, stream_weights>(panel, 64);
    load_operand<4, !stream_weights>(top, stride);
    load_operand<7, stream_weights>(panel + kWeightBlockBytes / 2, 64);
    tile_dot<int8, 0, 4, 6>();
    if (second) load_operand<5, !stream_weights>(bottom, stride);
    tile_dot<int8, 1, 4, 7>();
    if (second) tile_dot<int8, 2, 5, 6>(), tile_dot<int8, 3, 5, 7>();
    panel += kWeightBlockBytes, top += kRowBlockBytes, bottom += kRowBlockBytes;
    before.step();
  }
  // No later: a load behind a store whose address is the same modulo 4096 waits for it, and these wait for all products.
  before.finish();
  tile_store<0>(sums, 128), tile_store<1>(sums + 16, 128);
  if (second) tile_store<2>(sums + 16 * 32, 128), tile_store<3>(sums + 16 * 32 + 16, 128);
}

// `before` is other work: step() does some of it beside the products of a block, finish() what is left.
template <bool int8, bool stream_weights, class Before>
static inline void multiply_rows(const LinearRows &rows, const char *panel, int num_blocks, Ahead ahead, Before &before,
                                 float *sums) {
  rows.count > 16 ? multiply_panel<int8, true, stream_weights>(rows, panel, num_blocks, ahead, before, sums)
                  : multiply_panel<int8, false, stream_weights>(rows, panel, num_blocks, ahead, before, sums);
}

#else

constexpr int kRowStep = 1;

struct PairSums {
  using Sum = Vec;
  using Weights = WeightPairs;
  using Input = InputPair;
  static Sum none() { return zero(); }
  static Weights weights(const char *p) { return load_pairs(reinterpret_cast<const uint16_t *>(p)); }
  static Input input(const char *p) { return splat_input(reinterpret_cast<const uint16_t *>(p)); }
  static Sum add(Sum sum, Input input, Weights weights) { return add_pair(sum, input, weights); }
  static void put(float *to, Sum sum) { store(to, sum); }
};

// Four int8 weights meet four unsigned inputs.
struct QuadSums {
#if BG_LEVEL >= 2
  using Sum = __m512i;
  using Weights = __m512i;
  using Input = __m512i;
  static Sum none() { return _mm512_setzero_si512(); }
  static Weights weights(const char *p) { return _mm512_loadu_si512(p); }
  static Input input(const char *p) {
    int32_t quad;
    std::memcpy(&quad, p, sizeof quad);
    return _mm512_set1_epi32(quad);
  }
  static Sum add(Sum sum, Input input, Weights weights) { return _mm512_dpbusd_epi32(sum, input, weights); }
  static void put(float *to, Sum sum) { _mm512_storeu_si512(to, sum); }
#else
  struct Sum {
    int32_t x[kLanes];
  };
  using Weights = const int8_t *;
  using Input = const uint8_t *;
  static Sum none() { return {}; }
  static Weights weights(const char *p) { return reinterpret_cast<Weights>(p); }
  static Input input(const char *p) { return reinterpret_cast<Input>(p); }
  static Sum add(Sum sum, Input input, Weights weights) {
    for (int i = 0; i < kLanes; ++i)
      for (int j = 0; j < 4; ++j) sum.x[i] += int32_t(input[j]) * weights[4 * i + j];
    return sum;
  }
  static void put(float *to, Sum sum) { std::memcpy(to, sum.x, sizeof sum.x); }
#endif
};

template <class S, int R>
static inline void multiply_some(const LinearRows &rows, int row, const char *panel, int num_blocks, float *sums) {
  const char *x = rows.x + row * rows.stride;
  typename S::Sum sum[R][2];
  for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = S::none();
  for (int block = 0; block < num_blocks; ++block, panel += kWeightBlockBytes, x += kRowBlockBytes)
    for (int at = 0; at < kRowBlockBytes; at += 4) {
      const auto left = S::weights(panel + at * kLanes), right = S::weights(panel + kWeightBlockBytes / 2 + at * kLanes);
      for (int r = 0; r < R; ++r) {
        const auto input = S::input(x + r * rows.stride + at);
        sum[r][0] = S::add(sum[r][0], input, left);
        sum[r][1] = S::add(sum[r][1], input, right);
      }
    }
  for (int r = 0; r < R; ++r)
    for (int half = 0; half < 2; ++half) S::put(sums + (row + r) * kPanelColumns + half * kLanes, sum[r][half]);
}

template <bool int8, bool, class Before>
static inline void multiply_rows(const LinearRows &rows, const char *panel, int num_blocks, Ahead, Before &before,
                                 float *sums) {
  before.finish();
  using S = std::conditional_t<int8, QuadSums, PairSums>;
  constexpr int kMost = BG_LEVEL >= 3 || (int8 && BG_LEVEL >= 2) ? 12 : BG_LEVEL >= 2 ? 8 : 2;
  int row = 0;
  for (; row + kMost <= rows.count; row += kMost) multiply_some<S, kMost>(rows, row, panel, num_blocks, sums);
  for (; row + 4 <= rows.count && kMost > 4; row += 4) multiply_some<S, 4>(rows, row, panel, num_blocks, sums);
  for (; row < rows.count; ++row) multiply_some<S, 1>(rows, row, panel, num_blocks, sums);
}

#endif
