// Products of one segment in fp32 (bf16 and int8 caches are widened first): lanes are rows, keys are broadcast.
// Included once per level, inside that level's namespace, after attention_segment.h.

template <typename Query, typename Cache, int L> class FloatTile {
 public:
  using QueryType = Query;
  using CacheType = Cache;
  static constexpr int kRows = L, kProductsPerKey = L;

  static int value_width(int head_dim_v) { return (head_dim_v + kLanes - 1) / kLanes * kLanes; }
  static void begin_tasks() {}
  static int product_steps(int, int) { return 0; }

  FloatTile(Scratch &scratch, int head_dim_k, int head_dim_v, int, int num_tiles)
      : dim_k_(head_dim_k), dim_v_(head_dim_v), width_(value_width(head_dim_v)),
        queries_(scratch.take<float>(size_t(num_tiles) * head_dim_k * L)) {
    std::memset(queries_, 0, sizeof(float) * size_t(num_tiles) * head_dim_k * L);
    if constexpr (!std::is_same_v<Cache, float>) keys_ = scratch.take<float>(size_t(kSegmentTokens) * dim_k_);
    if (!std::is_same_v<Cache, float> || width_ != dim_v_) values_ = scratch.take<float>(size_t(kSegmentTokens) * width_);
  }

  // The rows of a tile; lanes from `count` on are as if they were 0.
  void set_queries(int tile, const Query *const *rows, int count) {
    float *to = queries_ + size_t(tile) * dim_k_ * L;
    float wide[kLanes];
    for (int lane = 0; lane < count; ++lane, ++to)
      for (int d = 0; d < dim_k_; d += kLanes) {
        const int n = std::min(kLanes, dim_k_ - d);
        store(wide, load_as(rows[lane] + d, n));
        for (int i = 0; i < n; ++i) to[(d + i) * L] = wide[i];
      }
  }

  // Keys [begin, end) of one segment; rows[k] is the cache row of key k.
  void load_keys(const Cache *k_cache, const int64_t *rows, int begin, int end) {
    for (int key = begin; key < end; ++key) key_rows_[key] = widen(k_cache + rows[key] * dim_k_, keys_, key, dim_k_, dim_k_);
    // Unseen keys beside them are computed and masked: any readable row will do.
    for (int key = begin / kLanes * kLanes; key < begin; ++key) key_rows_[key] = key_rows_[begin];
    for (int key = end; key % kLanes; ++key) key_rows_[key] = key_rows_[begin];
  }

  void load_values(const Cache *v_cache, const int64_t *rows, int begin, int end, Prefetcher &fetches) {
    Prefetcher ahead = fetches;
    for (int key = begin; key < end; ++key) {
      value_rows_[key] = widen(v_cache + rows[key] * dim_v_, values_, key, dim_v_, width_);
      ahead.step();
    }
    fetches = ahead;
    for (int key = begin / kLanes * kLanes; key < begin; ++key) value_rows_[key] = value_rows_[begin];
    for (int key = end; key % kLanes; ++key) value_rows_[key] = value_rows_[begin];
  }

  // products[key][L] of keys [begin, end), each summed over the head size from first to last.
  void multiply_keys(int tile, int begin, int end, float *products, Prefetcher &) const {
    const float *q = queries_ + size_t(tile) * dim_k_ * L;
    for (int key = begin; key < end; key += kKeys) multiply_some(q, key_rows_ + key, products + key * L);
  }
  PlainProducts<L> products(int, const float *products) const { return {products}; }

  void round_weights(const float *, int, int, uint16_t *) const {}

  // out[row][d] = sum over keys [begin, end), in order, of weights[key][row] * value[key][d].
  void weigh_values(const float *weights, const uint16_t *, int num_rows, int begin, int end, float *out, Prefetcher &) const {
    int row = 0;
    for (; row + kSums <= num_rows; row += kSums)
      weigh_some<kSums>(weights + row, value_rows_, begin, end, out + row * width_);
    for (; row < num_rows; ++row) weigh_some<1>(weights + row, value_rows_, begin, end, out + row * width_);
  }

  Vec value_lanes(const float *values, int d) const { return load(values + d); }

 private:
  // Independent sums in flight; more would not fit in the registers.
  static constexpr int kKeys = BG_LEVEL >= 2 || L == 4 ? 8 : 4;
  static constexpr int kSums = BG_LEVEL >= 2 ? 4 : 2;

  static const float *widen(const Cache *from, float *buffer, int key, int dim, int stride) {
    if constexpr (std::is_same_v<Cache, float>)
      if (dim == stride) return from;
    float *to = buffer + size_t(key) * stride;
    for (int d = 0; d < dim; d += kLanes) {
      const int n = std::min(kLanes, dim - d);
      store_as(to + d, load_as(from + d, n), std::min(kLanes, stride - d));
    }
    return to;
  }

  void multiply_some(const float *q, const float *const *keys, float *products) const {
    if constexpr (L == kLanes) {
      Vec sum[kKeys];
      for (int i = 0; i < kKeys; ++i) sum[i] = zero();
      for (int d = 0; d < dim_k_; ++d) {
        const Vec query = load(q + d * L);
        for (int i = 0; i < kKeys; ++i) sum[i] = fma(query, splat(keys[i][d]), sum[i]);
      }
      for (int i = 0; i < kKeys; ++i) store(products + i * L, sum[i]);
    } else {
      Quad sum[kKeys] = {};
      for (int d = 0; d < dim_k_; ++d) {
        const Quad query = load_quad(q + d * L);
        for (int i = 0; i < kKeys; ++i) sum[i] = fma_quad(query, keys[i][d], sum[i]);
      }
      for (int i = 0; i < kKeys; ++i) store_quad(products + i * L, sum[i]);
    }
  }

  template <int N>
  void weigh_some(const float *weights, const float *const *values, int begin, int end, float *out) const {
    int d = 0;
    for (; d + 2 * kLanes <= width_; d += 2 * kLanes) weigh_block<N, 2>(weights, values, begin, end, out, d);
    if (d < width_) weigh_block<N, 1>(weights, values, begin, end, out, d);
  }

  template <int N, int M>
  void weigh_block(const float *weights, const float *const *values, int begin, int end, float *out, int d) const {
    Vec sum[N][M];
    for (int i = 0; i < N; ++i)
      for (int j = 0; j < M; ++j) sum[i][j] = zero();
    for (int key = begin; key < end; ++key) {
      Vec value[M];
      for (int j = 0; j < M; ++j) value[j] = load(values[key] + d + j * kLanes);
      for (int i = 0; i < N; ++i) {
        const Vec weight = splat(weights[key * L + i]);
        for (int j = 0; j < M; ++j) sum[i][j] = fma(weight, value[j], sum[i][j]);
      }
    }
    for (int i = 0; i < N; ++i)
      for (int j = 0; j < M; ++j) store(out + i * width_ + d + j * kLanes, sum[i][j]);
  }

  const int dim_k_, dim_v_, width_;
  float *queries_, *keys_ = nullptr, *values_ = nullptr;
  const float *key_rows_[kSegmentTokens], *value_rows_[kSegmentTokens];
};
