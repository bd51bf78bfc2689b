// The products of PairTile on dot-product instructions. Included once, inside the AVX512-BF16 level's namespace.

static inline void multiply_eight(const uint16_t *keys, const uint16_t *q, int dim, float *products, std::integral_constant<int, 16>) {
  Vec sum[8];
  for (int i = 0; i < 8; ++i) sum[i] = zero();
  for (int d = 0; d < dim; d += 2) {
    const WeightPairs query = load_pairs(q + d * 16);
    for (int i = 0; i < 8; ++i) sum[i] = add_pair(sum[i], splat_input(keys + i * dim + d), query);
  }
  for (int i = 0; i < 8; ++i) store(products + i * 16, sum[i]);
}

static inline void multiply_eight(const uint16_t *keys, const uint16_t *q, int dim, float *products, std::integral_constant<int, 4>) {
  __m128 sum[8];
  for (int i = 0; i < 8; ++i) sum[i] = _mm_setzero_ps();
  for (int d = 0; d < dim; d += 2) {
    const __m128bh query = __m128bh(_mm_loadu_si128(reinterpret_cast<const __m128i *>(q + d * 4)));
    for (int i = 0; i < 8; ++i) {
      int32_t pair;
      std::memcpy(&pair, keys + i * dim + d, sizeof pair);
      sum[i] = _mm_dpbf16_ps(sum[i], __m128bh(_mm_set1_epi32(pair)), query);
    }
  }
  for (int i = 0; i < 8; ++i) _mm_storeu_ps(products + i * 4, sum[i]);
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

template <int L> struct PairProducts {
  static void begin_tasks() {}
  static int num_steps(int, int) { return 0; }

  static void multiply_keys(const uint16_t *const *key_rows, const uint16_t *q, int dim, int begin, int end, float *products,
                            Prefetcher &) {
    for (int key = begin; key < end; key += 8)
      multiply_eight(key_rows[key / 16] + size_t(key % 16) * dim, q, dim, products + key * L, std::integral_constant<int, L>());
  }

  static void weigh_values(const uint16_t *weights, const uint16_t *values, int width, int num_rows, int begin, int end,
                           float *out, Prefetcher &) {
    int row = 0;
    for (; row + 4 <= num_rows; row += 4)
      weigh_rows<4>(weights + row * kSegmentTokens, values, width, begin, end, out + row * width);
    for (; row < num_rows; ++row)
      weigh_rows<1>(weights + row * kSegmentTokens, values, width, begin, end, out + row * width);
  }
};
