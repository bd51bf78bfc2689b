// Products of one segment on bf16 pairs: AMX tiles at level 4, dot-product instructions at level 3, one layout for both.
// Included once per level from 3 on, inside that level's namespace, after attention_segment.h.
//
// Pairs: two neighbours along the summed dimension share 32 bits. Values are interleaved by unpack instructions, which
// permutes each 32 of them; value_lanes() puts them right when the result is read.

static inline void transpose_16x16(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 4) {
    const __m512i a = _mm512_unpacklo_epi32(r[i], r[i + 1]), b = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    const __m512i c = _mm512_unpacklo_epi32(r[i + 2], r[i + 3]), d = _mm512_unpackhi_epi32(r[i + 2], r[i + 3]);
    t[i] = _mm512_unpacklo_epi64(a, c), t[i + 1] = _mm512_unpackhi_epi64(a, c);
    t[i + 2] = _mm512_unpacklo_epi64(b, d), t[i + 3] = _mm512_unpackhi_epi64(b, d);
  }
  // t[4 i + c] holds, in its 128-bit lane l, column 4 l + c of rows 4 i to 4 i + 3.
  for (int c = 0; c < 4; ++c) {
    const __m512i a = _mm512_shuffle_i32x4(t[c], t[4 + c], 0x88), b = _mm512_shuffle_i32x4(t[8 + c], t[12 + c], 0x88);
    const __m512i e = _mm512_shuffle_i32x4(t[c], t[4 + c], 0xdd), f = _mm512_shuffle_i32x4(t[8 + c], t[12 + c], 0xdd);
    r[c] = _mm512_shuffle_i32x4(a, b, 0x88), r[8 + c] = _mm512_shuffle_i32x4(a, b, 0xdd);
    r[4 + c] = _mm512_shuffle_i32x4(e, f, 0x88), r[12 + c] = _mm512_shuffle_i32x4(e, f, 0xdd);
  }
}

template <typename Cache> class PairTile {
 public:
  using QueryType = uint16_t;
  using CacheType = Cache;

  static int value_width(int head_dim_v) { return (head_dim_v + 31) / 32 * 32; }

  PairTile(Scratch &scratch, int head_dim_k, int head_dim_v, int block_size, int num_tiles)
      : dim_k_(head_dim_k), dim_v_(head_dim_v), padded_k_((head_dim_k + 31) / 32 * 32), width_(value_width(head_dim_v)),
        direct_(std::is_same_v<Cache, uint16_t> && padded_k_ == dim_k_ && block_size % kLanes == 0),
        queries_(scratch.take<uint16_t>(size_t(num_tiles) * padded_k_ * kLanes)),
        values_(scratch.take<uint16_t>(size_t(kSegmentTokens) * width_)),
        weights_(scratch.take<uint16_t>(size_t(kSegmentTokens) * kLanes)) {
    std::memset(queries_, 0, sizeof(uint16_t) * size_t(num_tiles) * padded_k_ * kLanes);
    if (direct_) return;
    keys_ = scratch.take<uint16_t>(size_t(kSegmentTokens) * padded_k_);
    std::memset(keys_, 0, sizeof(uint16_t) * size_t(kSegmentTokens) * padded_k_);
  }

  // queries_[tile][d / 2][lane] holds the pair (d, d + 1).
  void set_query(int tile, int lane, const uint16_t *q) {
    uint32_t *to = reinterpret_cast<uint32_t *>(queries_) + size_t(tile) * padded_k_ / 2 * kLanes + lane;
    for (int d = 0; d + 2 <= dim_k_; d += 2) std::memcpy(to + d / 2 * kLanes, q + d, sizeof(uint32_t));
    if (dim_k_ % 2) to[dim_k_ / 2 * kLanes] = q[dim_k_ - 1];
  }

  void load_segment(const Cache *k_cache, const Cache *v_cache, const int64_t *rows, int begin, int end) {
    for (int tile = begin / kLanes; tile * kLanes < end; ++tile) {
      const int first = std::max(begin, tile * kLanes), last = std::min(end, (tile + 1) * kLanes);
      if (direct_) {
        // The tile lies in one block, so its other rows can be read, and are masked later.
        key_rows_[tile] = reinterpret_cast<const uint16_t *>(k_cache + (rows[first] - first % kLanes) * dim_k_);
        continue;
      }
      for (int key = first; key < last; ++key) copy_row(k_cache + rows[key] * dim_k_, dim_k_, keys_ + key * padded_k_);
      key_rows_[tile] = keys_ + tile * kLanes * padded_k_;
    }
    // Keys outside [begin, end) weigh 0, and 0 times whatever lies there must be 0.
    for (int pair = 0; pair < kSegmentTokens / 2; ++pair) {
      const int key = 2 * pair;
      const Cache *even = key >= begin && key < end ? v_cache + rows[key] * dim_v_ : nullptr;
      const Cache *odd = key + 1 >= begin && key + 1 < end ? v_cache + rows[key + 1] * dim_v_ : nullptr;
      uint16_t *to = values_ + size_t(pair) * width_ * 2;
      for (int d = 0; d < width_; d += 32) {
        const int n = std::min(32, dim_v_ - d);
        const __m512i a = even ? load_32(even + d, n) : _mm512_setzero_si512();
        const __m512i b = odd ? load_32(odd + d, n) : _mm512_setzero_si512();
        _mm512_storeu_si512(to + d * 2, _mm512_unpacklo_epi16(a, b));
        _mm512_storeu_si512(to + d * 2 + 32, _mm512_unpackhi_epi16(a, b));
      }
    }
  }

  void multiply_keys(int tile, int num_rows, int begin, int end, float *products) const;
  void weigh_values(float *weights, int num_rows, int begin, int end, float *out);

  Vec value_lanes(const float *values, int d) const {
    const __m512 a = _mm512_loadu_ps(values + d / 32 * 32), b = _mm512_loadu_ps(values + d / 32 * 32 + 16);
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    return {_mm512_permutex2var_ps(a, d % 32 ? _mm512_add_epi32(low, _mm512_set1_epi32(8)) : low, b)};
  }

 private:
  static __m512i load_32(const uint16_t *p, int n) {
    if (n == 32) return _mm512_loadu_si512(p);
    return _mm512_maskz_loadu_epi16((__mmask32(1) << n) - 1, p);
  }
  // Every int8 is a bf16.
  static __m512i load_32(const int8_t *p, int n) {
    const __m256i bytes = n == 32 ? _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))
                                  : _mm256_maskz_loadu_epi8((__mmask32(1) << n) - 1, p);
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
    return __m512i(_mm512_cvtne2ps_pbh(high, low));
  }
  static void copy_row(const Cache *from, int dim, uint16_t *to) {
    for (int d = 0; d < dim; d += 32) {
      const int n = std::min(32, dim - d);
      _mm512_mask_storeu_epi16(to + d, n == 32 ? ~__mmask32(0) : (__mmask32(1) << n) - 1, load_32(from + d, n));
    }
  }

  // weights_[row][key] in bf16, zero outside [begin, end); both are multiples of 16.
  void transpose_weights(const float *weights, int begin, int end) {
    const __m512i interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                                6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (int half = 0; half < kSegmentTokens; half += 32) {
      __m512i pairs[16];
      for (int i = 0; i < 16; ++i) {
        const int key = half + 2 * i;
        pairs[i] = _mm512_setzero_si512();
        if (key < begin || key >= end) continue;
        const __m512 even = _mm512_loadu_ps(weights + key * kLanes), odd = _mm512_loadu_ps(weights + (key + 1) * kLanes);
        pairs[i] = _mm512_permutexvar_epi16(interleave, __m512i(_mm512_cvtne2ps_pbh(odd, even)));
      }
      transpose_16x16(pairs);
      for (int row = 0; row < kLanes; ++row) _mm512_storeu_si512(weights_ + row * kSegmentTokens + half, pairs[row]);
    }
  }

  const int dim_k_, dim_v_, padded_k_, width_;
  const bool direct_;
  uint16_t *queries_, *values_, *weights_, *keys_ = nullptr;
  const uint16_t *key_rows_[kSegmentTokens / kLanes];
};

#if BG_LEVEL >= 4

template <typename Cache>
void PairTile<Cache>::multiply_keys(int tile, int, int begin, int end, float *products) const {
  const uint16_t *q = queries_ + size_t(tile) * padded_k_ * kLanes;
  const size_t stride = size_t(padded_k_) * sizeof(uint16_t);
  for (int key = begin; key < end; key += kLanes) {
    const uint16_t *keys = key_rows_[key / kLanes];
    tile_zero<0>();
    for (int d = 0; d < padded_k_; d += 32) {
      tile_load<4>(keys + d, stride);
      tile_load<5>(q + d * kLanes, 64);
      tile_dot_bf16<0, 4, 5>();
    }
    tile_store<0>(products + key * kLanes, 64);
  }
}

template <typename Cache>
void PairTile<Cache>::weigh_values(float *weights, int, int begin, int end, float *out) {
  transpose_weights(weights, begin, end);
  const size_t row_bytes = size_t(width_) * sizeof(float);
  for (int d = 0; d < width_; d += 32) {
    tile_zero<0>();
    tile_zero<1>();
    for (int half = begin / 32 * 32; half < end; half += 32) {
      const uint16_t *values = values_ + size_t(half) * width_ + d * 2;
      tile_load<4>(weights_ + half, kSegmentTokens * sizeof(uint16_t));
      tile_load<5>(values, row_bytes);
      tile_dot_bf16<0, 4, 5>();
      tile_load<6>(values + 32, row_bytes);
      tile_dot_bf16<1, 4, 6>();
    }
    tile_store<0>(out + d, row_bytes);
    tile_store<1>(out + d + 16, row_bytes);
  }
}

#else

template <typename Cache>
void PairTile<Cache>::multiply_keys(int tile, int, int begin, int end, float *products) const {
  constexpr int kKeys = 8;
  const uint16_t *q = queries_ + size_t(tile) * padded_k_ * kLanes;
  for (int key = begin; key < end; key += kKeys) {
    const uint16_t *keys = key_rows_[key / kLanes] + size_t(key % kLanes) * padded_k_;
    Vec sum[kKeys];
    for (int i = 0; i < kKeys; ++i) sum[i] = zero();
    for (int d = 0; d < padded_k_; d += 2) {
      const WeightPairs query = load_pairs(q + d * kLanes);
      for (int i = 0; i < kKeys; ++i) sum[i] = add_pair(sum[i], splat_input(keys + i * padded_k_ + d), query);
    }
    for (int i = 0; i < kKeys; ++i) store(products + (key + i) * kLanes, sum[i]);
  }
}

template <int N>
static inline void weigh_rows(const uint16_t *weights, const uint16_t *values, int width, int begin, int end, float *out) {
  for (int d = 0; d < width; d += 32) {
    Vec sum[N][2];
    for (int i = 0; i < N; ++i) sum[i][0] = sum[i][1] = zero();
    for (int key = begin; key < end; key += 2) {
      const uint16_t *pairs = values + size_t(key) * width + d * 2;
      const WeightPairs low = load_pairs(pairs), high = load_pairs(pairs + 32);
      for (int i = 0; i < N; ++i) {
        const InputPair weight = splat_input(weights + i * kSegmentTokens + key);
        sum[i][0] = add_pair(sum[i][0], weight, low);
        sum[i][1] = add_pair(sum[i][1], weight, high);
      }
    }
    for (int i = 0; i < N; ++i) store(out + i * width + d, sum[i][0]), store(out + i * width + d + 16, sum[i][1]);
  }
}

template <typename Cache>
void PairTile<Cache>::weigh_values(float *weights, int num_rows, int begin, int end, float *out) {
  transpose_weights(weights, begin, end);
  int row = 0;
  for (; row + 4 <= num_rows; row += 4)
    weigh_rows<4>(weights_ + row * kSegmentTokens, values_, width_, begin, end, out + row * width_);
  for (; row < num_rows; ++row)
    weigh_rows<1>(weights_ + row * kSegmentTokens, values_, width_, begin, end, out + row * width_);
}

#endif
