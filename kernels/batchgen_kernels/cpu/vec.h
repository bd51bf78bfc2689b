// Sixteen float lanes, with one meaning on every processor level: each operation rounds exactly as written (the files
// are compiled with -ffp-contract=off), so a lane's result never depends on which lanes ride along.
//
// Included once per level, inside that level's namespace; BG_LEVEL is 0 portable, 1 AVX2, 2 AVX-512, 3 + bf16, 4 + AMX.

struct Vec {
#if BG_LEVEL >= 2
  __m512 x;
#elif BG_LEVEL == 1
  __m256 x, y;
#else
  float x[kLanes];
#endif
};

// One bit per lane.
using Mask = uint16_t;

#if BG_LEVEL >= 2

static inline Vec load(const float *p) { return {_mm512_loadu_ps(p)}; }
static inline Vec load_first(const float *p, int n) { return {_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p)}; }
static inline void store(float *p, Vec a) { _mm512_storeu_ps(p, a.x); }
static inline void store_first(float *p, Vec a, int n) { _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), a.x); }
static inline Vec splat(float a) { return {_mm512_set1_ps(a)}; }
static inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.x, b.x)}; }
static inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.x, b.x)}; }
static inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.x, b.x)}; }
static inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.x, b.x)}; }
static inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }
static inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.x, b.x)}; }
static inline Vec round_even(Vec a) { return {_mm512_roundscale_ps(a.x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
static inline Vec select(Mask m, Vec a, Vec b) { return {_mm512_mask_blend_ps(m, b.x, a.x)}; }
static inline Mask greater(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.x, b.x, _CMP_GT_OQ); }
// a * 2^n for integral n in [-126, 127].
static inline Vec scale_by_power(Vec a, Vec n) { return {_mm512_scalef_ps(a.x, n.x)}; }
static inline Vec load_bf16(const uint16_t *p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
static inline Vec load_bf16_first(const uint16_t *p, int n) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(__mmask16((1u << n) - 1), p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
static inline __m256i to_bf16(Vec a) {
#if BG_LEVEL >= 3
  return __m256i(_mm512_cvtneps_pbh(a.x));
#else
  const __m512i bits = _mm512_castps_si512(a.x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __m512i kept = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(a.x, a.x, _CMP_UNORD_Q), rounded, quiet);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
#endif
}
static inline void store_bf16(uint16_t *p, Vec a) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), to_bf16(a)); }
static inline void store_bf16_first(uint16_t *p, Vec a, int n) {
  _mm256_mask_storeu_epi16(p, __mmask16((1u << n) - 1), to_bf16(a));
}
static inline Vec load_int8(const int8_t *p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))))};
}

#elif BG_LEVEL == 1

static inline Vec load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float *p, Vec a) { _mm256_storeu_ps(p, a.x), _mm256_storeu_ps(p + 8, a.y); }
static inline Vec splat(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
static inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.x, b.x), _mm256_add_ps(a.y, b.y)}; }
static inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.x, b.x), _mm256_sub_ps(a.y, b.y)}; }
static inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.x, b.x), _mm256_mul_ps(a.y, b.y)}; }
static inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.x, b.x), _mm256_div_ps(a.y, b.y)}; }
static inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.x, b.x, c.x), _mm256_fmadd_ps(a.y, b.y, c.y)}; }
static inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.x, b.x), _mm256_max_ps(a.y, b.y)}; }
static inline Vec round_even(Vec a) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.x, kMode), _mm256_round_ps(a.y, kMode)};
}
static inline __m256 widen_mask(int bits) {
  const __m256i lane_bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(bits), lane_bit), lane_bit));
}
static inline Vec select(Mask m, Vec a, Vec b) {
  return {_mm256_blendv_ps(b.x, a.x, widen_mask(m & 0xff)), _mm256_blendv_ps(b.y, a.y, widen_mask(m >> 8))};
}
static inline Mask greater(Vec a, Vec b) {
  return Mask(_mm256_movemask_ps(_mm256_cmp_ps(a.x, b.x, _CMP_GT_OQ)) |
              _mm256_movemask_ps(_mm256_cmp_ps(a.y, b.y, _CMP_GT_OQ)) << 8);
}
static inline __m256 power_of_two(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
static inline Vec scale_by_power(Vec a, Vec n) {
  return {_mm256_mul_ps(a.x, power_of_two(n.x)), _mm256_mul_ps(a.y, power_of_two(n.y))};
}
static inline __m256 widen_bf16(const uint16_t *p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
static inline Vec load_bf16(const uint16_t *p) { return {widen_bf16(p), widen_bf16(p + 8)}; }
static inline Vec load_int8(const int8_t *p) {
  const auto widen = [](const int8_t *q) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(q))));
  };
  return {widen(p), widen(p + 8)};
}

#else

template <typename F> static inline Vec each_lane(F f) {
  Vec r;
  for (int i = 0; i < kLanes; ++i) r.x[i] = f(i);
  return r;
}
static inline Vec load(const float *p) { return each_lane([&](int i) { return p[i]; }); }
static inline void store(float *p, Vec a) { std::memcpy(p, a.x, sizeof a.x); }
static inline Vec splat(float a) { return each_lane([&](int) { return a; }); }
static inline Vec operator+(Vec a, Vec b) { return each_lane([&](int i) { return a.x[i] + b.x[i]; }); }
static inline Vec operator-(Vec a, Vec b) { return each_lane([&](int i) { return a.x[i] - b.x[i]; }); }
static inline Vec operator*(Vec a, Vec b) { return each_lane([&](int i) { return a.x[i] * b.x[i]; }); }
static inline Vec operator/(Vec a, Vec b) { return each_lane([&](int i) { return a.x[i] / b.x[i]; }); }
// Two roundings here: without the instruction, a fused multiply-add would be a library call per lane.
static inline Vec fma(Vec a, Vec b, Vec c) { return each_lane([&](int i) { return a.x[i] * b.x[i] + c.x[i]; }); }
static inline Vec max(Vec a, Vec b) { return each_lane([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; }); }
static inline Vec round_even(Vec a) { return each_lane([&](int i) { return (a.x[i] + 12582912.0f) - 12582912.0f; }); }
static inline Vec select(Mask m, Vec a, Vec b) { return each_lane([&](int i) { return m >> i & 1 ? a.x[i] : b.x[i]; }); }
static inline Mask greater(Vec a, Vec b) {
  unsigned bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= unsigned(a.x[i] > b.x[i]) << i;
  return Mask(bits);
}
static inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
static inline Vec scale_by_power(Vec a, Vec n) {
  return each_lane([&](int i) { return a.x[i] * bits_to_float(uint32_t(int32_t(n.x[i]) + 127) << 23); });
}
static inline Vec load_bf16(const uint16_t *p) {
  return each_lane([&](int i) { return bits_to_float(uint32_t(p[i]) << 16); });
}
static inline Vec load_int8(const int8_t *p) { return each_lane([&](int i) { return float(p[i]); }); }

#endif

#if BG_LEVEL < 2

static inline Vec load_first(const float *p, int n) {
  float whole[kLanes] = {};
  std::memcpy(whole, p, sizeof(float) * size_t(n));
  return load(whole);
}
static inline void store_first(float *p, Vec a, int n) {
  float whole[kLanes];
  store(whole, a);
  std::memcpy(p, whole, sizeof(float) * size_t(n));
}
static inline Vec load_bf16_first(const uint16_t *p, int n) {
  uint16_t whole[kLanes] = {};
  std::memcpy(whole, p, sizeof(uint16_t) * size_t(n));
  return load_bf16(whole);
}
static inline void store_bf16_first(uint16_t *p, Vec a, int n) {
  float whole[kLanes];
  store(whole, a);
  for (int i = 0; i < n; ++i) p[i] = round_to_bf16(whole[i]);
}
static inline void store_bf16(uint16_t *p, Vec a) { store_bf16_first(p, a, kLanes); }

#endif

static inline Vec load_int8_first(const int8_t *p, int n) {
  int8_t whole[kLanes] = {};
  std::memcpy(whole, p, size_t(n));
  return load_int8(whole);
}

// Thirty-two values; `stream` (where p is aligned to 64 bytes) keeps them out of the caches.
static inline void store_bf16_32(uint16_t *p, Vec a, Vec b, bool stream) {
#if BG_LEVEL >= 3
  const __m512i both = __m512i(_mm512_cvtne2ps_pbh(b.x, a.x));
  stream ? _mm512_stream_si512(reinterpret_cast<__m512i *>(p), both) : _mm512_storeu_si512(p, both);
#else
  (void)stream;
  store_bf16(p, a), store_bf16(p + kLanes, b);
#endif
}

static inline void stream_32(float *p, Vec a, Vec b) {
#if BG_LEVEL >= 2
  _mm512_stream_ps(p, a.x), _mm512_stream_ps(p + kLanes, b.x);
#else
  store(p, a), store(p + kLanes, b);
#endif
}

static inline Vec zero() { return splat(0.0f); }

// e^a with a relative error below 2e-7 for a in [-87, 88]; below it stays at e^-87 (never NaN for a = -inf);
// NaN stays NaN.
static inline Vec exp(Vec a) {
  a = max(splat(-87.0f), a);
  const Vec n = round_even(a * splat(1.44269504088896341f));
  Vec r = fma(n, splat(-0.693359375f), a);
  r = fma(n, splat(2.12194440e-4f), r);
  Vec p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r);
  return scale_by_power(p + splat(1.0f), n);
}

// Sum and maximum over the lanes, always folded in halves.
static inline float reduce_add(Vec a) {
  float lane[kLanes];
  store(lane, a);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  return lane[0];
}
static inline float reduce_max(Vec a) {
  float lane[kLanes];
  store(lane, a);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
  return lane[0];
}

// Sixteen int32, of which only the first n are read; and the differences of those whose bits lie at `a`, as floats.
#if BG_LEVEL >= 2
using Ints = __m512i;
static inline Ints load_ints(const int32_t *p, int n) { return _mm512_maskz_loadu_epi32(__mmask16((1u << n) - 1), p); }
static inline Vec subtract(const float *a, Ints b) {
  return {_mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_loadu_si512(a), b))};
}
#else
struct Ints {
  int32_t x[kLanes];
};
static inline Ints load_ints(const int32_t *p, int n) {
  Ints ints = {};
  std::memcpy(ints.x, p, sizeof(int32_t) * size_t(n));
  return ints;
}
static inline Vec subtract(const float *a, const Ints &b) {
  int32_t left[kLanes];
  float wide[kLanes];
  std::memcpy(left, a, sizeof left);
  for (int i = 0; i < kLanes; ++i) wide[i] = float(int32_t(uint32_t(left[i]) - uint32_t(b.x[i])));
  return load(wide);
}
#endif

// Where the largest of some numbers is smaller they are quantized to zeros: the inverse of their step might be infinite.
constexpr float kAsGoodAsZero = 1e-30f;

// The first n of sixteen numbers in [-127, 127], rounded, plus 128.
static inline void store_shifted(uint8_t *p, Vec a, int n) {
#if BG_LEVEL >= 2
  const __m512i shifted = _mm512_add_epi32(_mm512_cvtps_epi32(a.x), _mm512_set1_epi32(128));
  const __m128i bytes = _mm512_cvtepi32_epi8(shifted);
  if (n == kLanes) return _mm_storeu_si128(reinterpret_cast<__m128i *>(p), bytes);
  _mm_mask_storeu_epi8(p, __mmask16((1u << n) - 1), bytes);
#else
  float steps[kLanes];
  store(steps, round_even(a));
  for (int i = 0; i < n; ++i) p[i] = uint8_t(int(std::clamp(steps[i], -127.0f, 127.0f)) + 128);
#endif
}

// The first n of sixteen whole numbers in [-127, 127].
static inline void store_int8(int8_t *p, Vec a, int n) {
#if BG_LEVEL >= 2
  _mm512_mask_cvtepi32_storeu_epi8(p, __mmask16((1u << n) - 1), _mm512_cvtps_epi32(a.x));
#else
  float steps[kLanes];
  store(steps, a);
  for (int i = 0; i < n; ++i) p[i] = int8_t(std::clamp(steps[i], -127.0f, 127.0f));
#endif
}

// 1 / a for a in [1, 2], to two roundings.
static inline Vec reciprocal(Vec a) {
#if BG_LEVEL >= 2
  const Vec guess = {_mm512_rcp14_ps(a.x)};
  return fma(guess, fma(splat(-1.0f) * a, guess, splat(1.0f)), guess);
#else
  return splat(1.0f) / a;
#endif
}

// Four lanes, for few rows: fma alone, with the bits of Vec's.
#if BG_LEVEL >= 1
using Quad = __m128;
static inline Quad load_quad(const float *p) { return _mm_loadu_ps(p); }
static inline void store_quad(float *p, Quad a) { _mm_storeu_ps(p, a); }
static inline Quad fma_quad(Quad a, float b, Quad c) { return _mm_fmadd_ps(a, _mm_set1_ps(b), c); }
#else
struct Quad {
  float x[4];
};
static inline Quad load_quad(const float *p) { return {{p[0], p[1], p[2], p[3]}}; }
static inline void store_quad(float *p, Quad a) { std::memcpy(p, a.x, sizeof a.x); }
static inline Quad fma_quad(Quad a, float b, Quad c) {
  for (int i = 0; i < 4; ++i) c.x[i] = a.x[i] * b + c.x[i];
  return c;
}
#endif

// p[0..3] in each group of four lanes; and p[i] in all lanes of group i.
static inline Vec repeat_quad(const float *p) {
#if BG_LEVEL >= 2
  return {_mm512_broadcast_f32x4(_mm_loadu_ps(p))};
#elif BG_LEVEL == 1
  return {_mm256_broadcast_ps(reinterpret_cast<const __m128 *>(p)), _mm256_broadcast_ps(reinterpret_cast<const __m128 *>(p))};
#else
  return each_lane([&](int i) { return p[i % 4]; });
#endif
}
static inline Vec stretch_quad(const float *p) {
#if BG_LEVEL >= 2
  const __m512i group = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  return {_mm512_permutexvar_ps(group, _mm512_castps128_ps512(_mm_loadu_ps(p)))};
#elif BG_LEVEL == 1
  return {_mm256_setr_ps(p[0], p[0], p[0], p[0], p[1], p[1], p[1], p[1]),
          _mm256_setr_ps(p[2], p[2], p[2], p[2], p[3], p[3], p[3], p[3])};
#else
  return each_lane([&](int i) { return p[i / 4]; });
#endif
}
// (g0 op g1) op (g2 op g3) of the four groups of lanes, in each group.
template <typename F> static inline Vec fold_groups(Vec a, F op) {
#if BG_LEVEL >= 2
  const Vec pairs = op(a, Vec{_mm512_shuffle_f32x4(a.x, a.x, 0xb1)});
  return op(pairs, Vec{_mm512_shuffle_f32x4(pairs.x, pairs.x, 0x4e)});
#else
  float x[kLanes], y[kLanes];
  store(x, a);
  for (int i = 0; i < kLanes; ++i) y[i] = x[i ^ 4];
  const Vec pairs = op(a, load(y));
  store(x, pairs);
  for (int i = 0; i < kLanes; ++i) y[i] = x[i ^ 8];
  return op(pairs, load(y));
#endif
}

// Element types by their storage, so that kernels are written once.
static inline Vec load_as(const float *p) { return load(p); }
static inline Vec load_as(const uint16_t *p) { return load_bf16(p); }
static inline Vec load_as(const int8_t *p) { return load_int8(p); }
static inline Vec load_as(const float *p, int n) { return n == kLanes ? load(p) : load_first(p, n); }
static inline Vec load_as(const uint16_t *p, int n) { return n == kLanes ? load_bf16(p) : load_bf16_first(p, n); }
static inline Vec load_as(const int8_t *p, int n) { return n == kLanes ? load_int8(p) : load_int8_first(p, n); }
static inline void store_as(float *p, Vec a, int n) { n == kLanes ? store(p, a) : store_first(p, a, n); }
static inline void store_as(uint16_t *p, Vec a, int n) { n == kLanes ? store_bf16(p, a) : store_bf16_first(p, a, n); }
