// Products of one segment on bf16 pairs: AMX tiles at level 4, dot-product instructions at level 3, one layout for both.
// Included once per level from 3 on, inside that level's namespace, after attention_keys.h and transpose.h.
//
// Pairs: two neighbours along the summed dimension share 32 bits. Values are interleaved by unpack instructions, which
// permutes each 32 of them; value_lanes() puts them right when the result is read.

template <typename Cache, int L> class PairTile {
 public:
  using QueryType = uint16_t;
  using CacheType = Cache;
  static constexpr int kRows = L;
  static constexpr int kProductsPerKey = TileKeys<Cache, L>::kProductsPerKey;

  static int value_width(int head_dim_v) { return (head_dim_v + 31) / 32 * 32; }
  static void begin_tasks() { TileKeys<Cache, L>::begin_tasks(); }
  // Of Prefetcher, in multiply_keys() and weigh_values() of one segment.
  static int product_steps(int head_dim_k, int head_dim_v) {
    return PairProducts<L>::num_steps(head_dim_k, value_width(head_dim_v));
  }

  PairTile(Scratch &scratch, int head_dim_k, int head_dim_v, int block_size, int num_tiles)
      : dim_v_(head_dim_v), width_(value_width(head_dim_v)), keys_(scratch, head_dim_k, block_size, num_tiles),
        values_(scratch.take<uint16_t>(size_t(kSegmentTokens) * width_)) {}

  // The rows of a tile; lanes from `count` on are as if they were 0.
  void set_queries(int tile, const uint16_t *const *rows, int count) { keys_.set_queries(tile, rows, count); }

  // Keys [begin, end) of one segment; rows[k] is the cache row of key k.
  void load_keys(const Cache *k_cache, const int64_t *rows, int begin, int end) { keys_.load(k_cache, rows, begin, end); }

  void load_values(const Cache *v_cache, const int64_t *rows, int begin, int end, Prefetcher &fetches) {
    Prefetcher ahead = fetches;
    // Keys outside [begin, end) weigh 0, and 0 times whatever lies there must be 0.
    for (int key = 0; key < kSegmentTokens; key += 2) {
      const Cache *even = key >= begin && key < end ? v_cache + rows[key] * dim_v_ : nullptr;
      const Cache *odd = key + 1 >= begin && key + 1 < end ? v_cache + rows[key + 1] * dim_v_ : nullptr;
      interleave_rows(even, odd, values_ + size_t(key) * width_);
      ahead.step();
    }
    fetches = ahead;
  }

  // Of keys [begin, end), both multiples of 16; products() reads them.
  void multiply_keys(int tile, int begin, int end, float *products, Prefetcher &ahead) const {
    keys_.multiply(tile, begin, end, products, ahead);
  }
  auto products(int tile, const float *products) const { return keys_.products(tile, products); }

  // rounded[row][key] in bf16, zero outside [begin, end).
  void round_weights(const float *weights, int begin, int end, uint16_t *rounded) const {
    if constexpr (L == kLanes)
      transpose_weights(weights, begin, end, rounded);
    else
      transpose_few_weights(weights, begin, end, rounded);
  }

  // out[row][d] = sum over keys [begin, end) of rounded[row][key] * value[key][d].
  void weigh_values(const float *, const uint16_t *rounded, int num_rows, int begin, int end, float *out,
                    Prefetcher &ahead) const {
    PairProducts<L>::weigh_values(rounded, values_, width_, num_rows, begin, end, out, ahead);
  }

  Vec value_lanes(const float *values, int d) const {
    const __m512 a = _mm512_loadu_ps(values + d / 32 * 32), b = _mm512_loadu_ps(values + d / 32 * 32 + 16);
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    return {_mm512_permutex2var_ps(a, d % 32 ? _mm512_add_epi32(low, _mm512_set1_epi32(8)) : low, b)};
  }

 private:
  void interleave_rows(const Cache *even, const Cache *odd, uint16_t *to) const {
    const Halves none = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (int d = 0; d < width_; d += 64) {
      const Halves a = even ? load_64(even + d, dim_v_ - d) : none, b = odd ? load_64(odd + d, dim_v_ - d) : none;
      interleave(a.first, b.first, to + d * 2);
      if (d + 32 < width_) interleave(a.second, b.second, to + d * 2 + 64);
    }
  }
  static void interleave(__m512i even, __m512i odd, uint16_t *to) {
    _mm512_storeu_si512(to, _mm512_unpacklo_epi16(even, odd));
    _mm512_storeu_si512(to + 32, _mm512_unpackhi_epi16(even, odd));
  }

  const int dim_v_, width_;
  TileKeys<Cache, L> keys_;
  uint16_t *values_;
};
