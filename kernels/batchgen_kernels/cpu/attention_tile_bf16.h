// Products of one segment on bf16 pairs: AMX tiles at level 4, dot-product instructions at level 3, one layout for both.
// Included once per level from 3 on, inside that level's namespace, after attention_segment.h and transpose.h.
//
// Pairs: two neighbours along the summed dimension share 32 bits. Values are interleaved by unpack instructions, which
// permutes each 32 of them; value_lanes() puts them right when the result is read.

template <typename Cache, int L> class PairTile {
 public:
  using QueryType = uint16_t;
  using CacheType = Cache;
  static constexpr int kRows = L;

  static int value_width(int head_dim_v) { return (head_dim_v + 31) / 32 * 32; }
  static void begin_tasks() { PairProducts<L>::begin_tasks(); }

  PairTile(Scratch &scratch, int head_dim_k, int head_dim_v, int block_size, int num_tiles)
      : dim_k_(head_dim_k), dim_v_(head_dim_v), padded_k_((head_dim_k + 31) / 32 * 32), width_(value_width(head_dim_v)),
        direct_(std::is_same_v<Cache, uint16_t> && padded_k_ == dim_k_ && block_size % kLanes == 0),
        queries_(scratch.take<uint16_t>(size_t(num_tiles) * padded_k_ * L)) {
    std::memset(queries_, 0, sizeof(uint16_t) * size_t(num_tiles) * padded_k_ * L);
    values_ = scratch.take<uint16_t>(size_t(kSegmentTokens) * width_);
    if (direct_) return;
    keys_ = scratch.take<uint16_t>(size_t(kSegmentTokens) * padded_k_);
    std::memset(keys_, 0, sizeof(uint16_t) * size_t(kSegmentTokens) * padded_k_);
  }

  // queries_[tile][d / 2][lane] holds the pair (d, d + 1).
  void set_query(int tile, int lane, const uint16_t *q) {
    uint32_t *to = reinterpret_cast<uint32_t *>(queries_) + size_t(tile) * padded_k_ / 2 * L + lane;
    for (int d = 0; d + 2 <= dim_k_; d += 2) std::memcpy(to + d / 2 * L, q + d, sizeof(uint32_t));
    if (dim_k_ % 2) to[dim_k_ / 2 * L] = q[dim_k_ - 1];
  }

  // Keys [begin, end) of one segment; rows[k] is the cache row of key k.
  void load_keys(const Cache *k_cache, const int64_t *rows, int begin, int end) {
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
  }

  void load_values(const Cache *v_cache, const int64_t *rows, int begin, int end, Prefetcher &ahead) {
    // Keys outside [begin, end) weigh 0, and 0 times whatever lies there must be 0.
    for (int key = 0; key < kSegmentTokens; key += 2) {
      const Cache *even = key >= begin && key < end ? v_cache + rows[key] * dim_v_ : nullptr;
      const Cache *odd = key + 1 >= begin && key + 1 < end ? v_cache + rows[key + 1] * dim_v_ : nullptr;
      interleave_rows(even, odd, values_ + size_t(key) * width_);
      ahead.step();
    }
  }

  // products[key][L] of keys [begin, end), both multiples of 16.
  void multiply_keys(int tile, int begin, int end, float *products) const {
    const uint16_t *q = queries_ + size_t(tile) * padded_k_ * L;
    PairProducts<L>::multiply_keys(key_rows_, q, padded_k_, begin, end, products);
  }

  // rounded[row][key] in bf16, zero outside [begin, end).
  void round_weights(const float *weights, int begin, int end, uint16_t *rounded) const {
    if constexpr (L == kLanes)
      transpose_weights(weights, begin, end, rounded);
    else
      transpose_few_weights(weights, begin, end, rounded);
  }

  // out[row][d] = sum over keys [begin, end) of rounded[row][key] * value[key][d].
  void weigh_values(const float *, const uint16_t *rounded, int num_rows, int begin, int end, float *out) const {
    PairProducts<L>::weigh_values(rounded, values_, width_, num_rows, begin, end, out);
  }

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
  void interleave_rows(const Cache *even, const Cache *odd, uint16_t *to) const {
    for (int d = 0; d < width_; d += 32) {
      const int n = std::min(32, dim_v_ - d);
      const __m512i a = even ? load_32(even + d, n) : _mm512_setzero_si512();
      const __m512i b = odd ? load_32(odd + d, n) : _mm512_setzero_si512();
      _mm512_storeu_si512(to + d * 2, _mm512_unpacklo_epi16(a, b));
      _mm512_storeu_si512(to + d * 2 + 32, _mm512_unpackhi_epi16(a, b));
    }
  }

  const int dim_k_, dim_v_, padded_k_, width_;
  const bool direct_;
  uint16_t *queries_, *values_, *keys_ = nullptr;
  const uint16_t *key_rows_[kSegmentTokens / kLanes];
};
