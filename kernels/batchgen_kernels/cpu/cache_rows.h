// Numbers of a cache's row as bf16, 64 at a time. Included once per level from 3 on, inside that level's namespace.

struct Halves {
  __m512i first, second;
};

static inline __mmask32 first_of_32(int n) {
  return n >= 32 ? ~__mmask32(0) : n <= 0 ? __mmask32(0) : (__mmask32(1) << n) - 1;
}

// The first n of them, then zeros.
static inline Halves load_64(const uint16_t *p, int n) {
  return {_mm512_maskz_loadu_epi16(first_of_32(n), p), _mm512_maskz_loadu_epi16(first_of_32(n - 32), p + 32)};
}

// Every int8 is a bf16.
#if BG_LEVEL >= 4

struct Int8Tables {
  alignas(64) uint8_t low[128], high[128];
};

// Both bytes of the bf16 of 0 to 127.
static constexpr Int8Tables make_int8_tables() {
  Int8Tables tables{};
  for (int magnitude = 1; magnitude < 128; ++magnitude) {
    int power = 0;
    while (magnitude >> (power + 1)) ++power;
    const int bits = (127 + power) << 7 | ((magnitude << (7 - power)) & 0x7f);
    tables.low[magnitude] = uint8_t(bits), tables.high[magnitude] = uint8_t(bits >> 8);
  }
  return tables;
}
constexpr Int8Tables kInt8Tables = make_int8_tables();

static inline __m512i look_up(const uint8_t *table, __m512i indexes) {
  return _mm512_permutex2var_epi8(_mm512_load_si512(table), indexes, _mm512_load_si512(table + 64));
}

static inline Halves load_64(const int8_t *p, int n) {
  const __m512i row = n >= 64 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi8((__mmask64(1) << n) - 1, p);
  // Bytes are interleaved within 128-bit lanes: each lane gets eight numbers of either half.
  const __m512i by_lane = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), row);
  const __m512i magnitude = _mm512_abs_epi8(by_lane), low = look_up(kInt8Tables.low, magnitude);
  const __m512i sign = _mm512_and_si512(by_lane, _mm512_set1_epi8(char(0x80)));
  const __m512i high = _mm512_or_si512(look_up(kInt8Tables.high, magnitude), sign);
  return {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
}

#else

static inline __m512i widen_32(__m256i bytes) {
  const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
  const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
  return __m512i(_mm512_cvtne2ps_pbh(high, low));
}

static inline Halves load_64(const int8_t *p, int n) {
  return {widen_32(_mm256_maskz_loadu_epi8(first_of_32(n), p)),
          widen_32(_mm256_maskz_loadu_epi8(first_of_32(n - 32), p + 32))};
}

#endif
