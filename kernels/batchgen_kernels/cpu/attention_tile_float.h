// Products of one segment in fp32 (bf16 and int8 caches are widened first): lanes are rows, keys are broadcast.
// Included once per level, inside that level's namespace, after attention_segment.h.

template <typename Query, typename Cache> class FloatTile {
 public:
  using QueryType = Query;
  using CacheType = Cache;

  static int value_width(int head_dim_v) { return (head_dim_v + kLanes - 1) / kLanes * kLanes; }

  FloatTile(Scratch &scratch, int head_dim_k, int head_dim_v, int, int num_tiles)
      : dim_k_(head_dim_k), dim_v_(head_dim_v), width_(value_width(head_dim_v)),
        queries_(scratch.take<float>(size_t(num_tiles) * head_dim_k * kLanes)) {
    if constexpr (!std::is_same_v<Cache, float>) keys_ = scratch.take<float>(size_t(kSegmentTokens) * dim_k_);
    if (!std::is_same_v<Cache, float> || width_ != dim_v_)
      values_ = scratch.take<float>(size_t(kSegmentTokens) * width_);
  }

  void set_query(int tile, int lane, const Query *q) {
    float *to = queries_ + size_t(tile) * dim_k_ * kLanes + lane;
    float wide[kLanes];
    for (int d = 0; d < dim_k_; d += kLanes) {
      const int n = std::min(kLanes, dim_k_ - d);
      store(wide, load_as(q + d, n));
      for (int i = 0; i < n; ++i) to[(d + i) * kLanes] = wide[i];
    }
  }

  // Keys and values [begin, end) of one segment; rows[k] is the cache row of key k.
  void load_segment(const Cache *k_cache, const Cache *v_cache, const int64_t *rows, int begin, int end) {
    for (int key = begin; key < end; ++key) {
      key_rows_[key] = widen(k_cache + rows[key] * dim_k_, keys_, key, dim_k_, dim_k_);
      value_rows_[key] = widen(v_cache + rows[key] * dim_v_, values_, key, dim_v_, width_);
    }
    // Unseen keys beside them are computed and masked: any readable row will do.
    for (int key = begin / kLanes * kLanes; key < begin; ++key) copy_rows(begin, key);
    for (int key = end; key % kLanes; ++key) copy_rows(begin, key);
  }

  // products[key][lane], each summed over the head size from first to last.
  void multiply_keys(int tile, int num_rows, int begin, int end, float *products) const {
    (void)num_rows;
    const float *q = queries_ + size_t(tile) * dim_k_ * kLanes;
    int key = begin;
    for (; key + kKeys <= end; key += kKeys) multiply_some<kKeys>(q, key, products);
    for (; key < end; ++key) multiply_some<1>(q, key, products);
  }

  // out[row][d] = sum over keys [begin, end), in order, of weights[key][row] * value[key][d].
  void weigh_values(float *weights, int num_rows, int begin, int end, float *out) const {
    int row = 0;
    for (; row + kRows <= num_rows; row += kRows) weigh_some<kRows>(weights, row, begin, end, out);
    for (; row < num_rows; ++row) weigh_some<1>(weights, row, begin, end, out);
  }

  Vec value_lanes(const float *values, int d) const { return load(values + d); }

 private:
  // Independent sums in flight; more would not fit in the registers.
  static constexpr int kKeys = BG_LEVEL >= 2 ? 8 : 4;
  static constexpr int kRows = BG_LEVEL >= 2 ? 4 : 2;
  static constexpr int kDims = 2;

  void copy_rows(int from, int to) { key_rows_[to] = key_rows_[from], value_rows_[to] = value_rows_[from]; }

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

  template <int N> void multiply_some(const float *q, int key, float *products) const {
    Vec sum[N];
    for (int i = 0; i < N; ++i) sum[i] = zero();
    for (int d = 0; d < dim_k_; ++d) {
      const Vec query = load(q + d * kLanes);
      for (int i = 0; i < N; ++i) sum[i] = fma(query, splat(key_rows_[key + i][d]), sum[i]);
    }
    for (int i = 0; i < N; ++i) store(products + (key + i) * kLanes, sum[i]);
  }

  template <int N> void weigh_some(const float *weights, int row, int begin, int end, float *out) const {
    int d = 0;
    for (; d + kDims * kLanes <= width_; d += kDims * kLanes) weigh_block<N, kDims>(weights, row, begin, end, out, d);
    for (; d < width_; d += kLanes) weigh_block<N, 1>(weights, row, begin, end, out, d);
  }

  template <int N, int M>
  void weigh_block(const float *weights, int row, int begin, int end, float *out, int d) const {
    Vec sum[N][M];
    for (int i = 0; i < N; ++i)
      for (int j = 0; j < M; ++j) sum[i][j] = zero();
    for (int key = begin; key < end; ++key) {
      Vec value[M];
      for (int j = 0; j < M; ++j) value[j] = load(value_rows_[key] + d + j * kLanes);
      for (int i = 0; i < N; ++i) {
        const Vec weight = splat(weights[key * kLanes + row + i]);
        for (int j = 0; j < M; ++j) sum[i][j] = fma(weight, value[j], sum[i][j]);
      }
    }
    for (int i = 0; i < N; ++i)
      for (int j = 0; j < M; ++j) store(out + (row + i) * width_ + d + j * kLanes, sum[i][j]);
  }

  const int dim_k_, dim_v_, width_;
  float *queries_, *keys_ = nullptr, *values_ = nullptr;
  const float *key_rows_[kSegmentTokens], *value_rows_[kSegmentTokens];
};
