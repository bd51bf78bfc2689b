// Pairs of bf16 that share 32 bits: sixteen pairs of weights, one broadcast pair of inputs, and their product added to
// a sum, at the levels without tiles. Included once per level, inside that level's namespace, after vec.h.

#if BG_LEVEL >= 3

using WeightPairs = __m512i;
using InputPair = __m512i;
static inline WeightPairs load_pairs(const uint16_t *p) { return _mm512_loadu_si512(p); }
static inline InputPair splat_input(const uint16_t *p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return _mm512_set1_epi32(pair);
}
static inline Vec add_pair(Vec sum, InputPair input, WeightPairs weights) {
  return {_mm512_dpbf16_ps(sum.x, __m512bh(input), __m512bh(weights))};
}

#else

struct WeightPairs {
  Vec even, odd;
};
struct InputPair {
  Vec even, odd;
};
static inline float widen_bf16_scalar(uint16_t value) {
  const uint32_t bits = uint32_t(value) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}
static inline InputPair splat_input(const uint16_t *p) {
  return {splat(widen_bf16_scalar(p[0])), splat(widen_bf16_scalar(p[1]))};
}
#if BG_LEVEL == 2
static inline WeightPairs load_pairs(const uint16_t *p) {
  const __m512i pairs = _mm512_loadu_si512(p);
  return {{_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))},
          {_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000))))}};
}
#elif BG_LEVEL == 1
static inline WeightPairs load_pairs(const uint16_t *p) {
  const __m256i high = _mm256_set1_epi32(int(0xffff0000));
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p + 16));
  return {{_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))},
          {_mm256_castsi256_ps(_mm256_and_si256(a, high)), _mm256_castsi256_ps(_mm256_and_si256(b, high))}};
}
#else
static inline WeightPairs load_pairs(const uint16_t *p) {
  return {each_lane([&](int i) { return widen_bf16_scalar(p[2 * i]); }),
          each_lane([&](int i) { return widen_bf16_scalar(p[2 * i + 1]); })};
}
#endif
static inline Vec add_pair(Vec sum, InputPair input, WeightPairs weights) {
  return fma(input.odd, weights.odd, fma(input.even, weights.even, sum));
}

#endif
