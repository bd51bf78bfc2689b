// Weights by key to bf16 weights by row, and queries by row to pairs by dimension. Included once per level from 3 on, inside
// that level's namespace.

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

// r[row] of sixteen pairs becomes [pair][row], side by side.
static inline void transpose_pairs(__m512i (&r)[16]) { transpose_16x16(r); }
static inline void transpose_pairs(__m512i (&r)[4]) {
  const __m512i a = _mm512_unpacklo_epi32(r[0], r[1]), b = _mm512_unpackhi_epi32(r[0], r[1]);
  const __m512i c = _mm512_unpacklo_epi32(r[2], r[3]), d = _mm512_unpackhi_epi32(r[2], r[3]);
  // Of 128-bit lane l, the pairs 4 l to 4 l + 3 of all rows; lanes are then put in order.
  const __m512i t[4] = {_mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c), _mm512_unpacklo_epi64(b, d),
                        _mm512_unpackhi_epi64(b, d)};
  const __m512i e = _mm512_shuffle_i32x4(t[0], t[1], 0x44), f = _mm512_shuffle_i32x4(t[2], t[3], 0x44);
  const __m512i g = _mm512_shuffle_i32x4(t[0], t[1], 0xee), h = _mm512_shuffle_i32x4(t[2], t[3], 0xee);
  r[0] = _mm512_shuffle_i32x4(e, f, 0x88), r[1] = _mm512_shuffle_i32x4(e, f, 0xdd);
  r[2] = _mm512_shuffle_i32x4(g, h, 0x88), r[3] = _mm512_shuffle_i32x4(g, h, 0xdd);
}

static inline __m512i round_two(const float *low, const float *high) {
  return __m512i(_mm512_cvtne2ps_pbh(_mm512_loadu_ps(high), _mm512_loadu_ps(low)));
}

// rounded[16][kSegmentTokens] from weights[key][16] of keys [begin, end); zero elsewhere.
static inline void transpose_weights(const float *weights, int begin, int end, uint16_t *rounded) {
  const __m512i interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                              21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  for (int half = 0; half < kSegmentTokens; half += 32) {
    __m512i pairs[16];
    for (int i = 0; i < 16; ++i) {
      const int key = half + 2 * i;
      pairs[i] = _mm512_setzero_si512();
      if (key < begin || key >= end) continue;
      pairs[i] = _mm512_permutexvar_epi16(interleave, round_two(weights + key * 16, weights + key * 16 + 16));
    }
    transpose_16x16(pairs);
    for (int row = 0; row < 16; ++row) _mm512_storeu_si512(rounded + row * kSegmentTokens + half, pairs[row]);
  }
}

// The same for weights[key][4].
static inline void transpose_few_weights(const float *weights, int begin, int end, uint16_t *rounded) {
  // Eight keys of four rows become four 128-bit lanes, one per row.
  const __m512i by_row = _mm512_set_epi16(31, 27, 23, 19, 15, 11, 7, 3, 30, 26, 22, 18, 14, 10, 6, 2, 29, 25, 21, 17, 13, 9,
                                          5, 1, 28, 24, 20, 16, 12, 8, 4, 0);
  for (int half = 0; half < kSegmentTokens; half += 32) {
    __m512i keys[4];
    for (int i = 0; i < 4; ++i) {
      const int key = half + 8 * i;
      keys[i] = _mm512_setzero_si512();
      if (key < begin || key >= end) continue;
      keys[i] = _mm512_permutexvar_epi16(by_row, round_two(weights + key * 4, weights + key * 4 + 16));
    }
    const __m512i a = _mm512_shuffle_i32x4(keys[0], keys[1], 0x44), b = _mm512_shuffle_i32x4(keys[2], keys[3], 0x44);
    const __m512i c = _mm512_shuffle_i32x4(keys[0], keys[1], 0xee), d = _mm512_shuffle_i32x4(keys[2], keys[3], 0xee);
    _mm512_storeu_si512(rounded + half, _mm512_shuffle_i32x4(a, b, 0x88));
    _mm512_storeu_si512(rounded + kSegmentTokens + half, _mm512_shuffle_i32x4(a, b, 0xdd));
    _mm512_storeu_si512(rounded + 2 * kSegmentTokens + half, _mm512_shuffle_i32x4(c, d, 0x88));
    _mm512_storeu_si512(rounded + 3 * kSegmentTokens + half, _mm512_shuffle_i32x4(c, d, 0xdd));
  }
}
