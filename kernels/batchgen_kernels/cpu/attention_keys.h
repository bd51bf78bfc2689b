// The keys of one segment and the queries that meet them: products of bf16 pairs. Included once per level from 3 on,
// inside that level's namespace, after cache_rows.h and pair_products_*.h.

// Where the tiles of sixteen keys lie, each row of 64 bytes or a multiple of them: in the cache where that has such rows side
// by side, else in copies that end in zeros.
template <typename Cache, typename Read> class KeyRows {
 public:
  KeyRows(Scratch &scratch, int dim, int block_size)
      : dim_(dim), padded_((dim + kRowOf64 - 1) / kRowOf64 * kRowOf64),
        direct_(std::is_same_v<Cache, Read> && padded_ == dim && block_size % kLanes == 0) {
    if (direct_) return;
    copies_ = scratch.take<Read>(size_t(kSegmentTokens) * padded_);
    std::memset(copies_, 0, sizeof(Read) * size_t(kSegmentTokens) * padded_);
  }

  int padded() const { return padded_; }
  const Read *const *tiles() const { return tiles_; }

  // Keys [begin, end) of one segment; rows[k] is the cache row of key k.
  void load(const Cache *cache, const int64_t *rows, int begin, int end) {
    for (int tile = begin / kLanes; tile * kLanes < end; ++tile) {
      const int first = std::max(begin, tile * kLanes), last = std::min(end, (tile + 1) * kLanes);
      if (direct_) {
        // The tile lies in one block, so its other rows can be read, and are masked later.
        tiles_[tile] = reinterpret_cast<const Read *>(cache + (rows[first] - first % kLanes) * dim_);
        continue;
      }
      for (int key = first; key < last; ++key) copy(cache + rows[key] * dim_, copies_ + key * padded_);
      tiles_[tile] = copies_ + tile * kLanes * padded_;
    }
  }

 private:
  static constexpr int kRowOf64 = 64 / sizeof(Read);

  void copy(const Cache *from, Read *to) const {
    if constexpr (std::is_same_v<Cache, Read>)
      std::memcpy(to, from, sizeof(Read) * size_t(dim_));
    else
      for (int d = 0; d < dim_; d += 64) {
        const Halves row = load_64(from + d, dim_ - d);
        _mm512_mask_storeu_epi16(to + d, first_of_32(dim_ - d), row.first);
        _mm512_mask_storeu_epi16(to + d + 32, first_of_32(dim_ - d - 32), row.second);
      }
  }

  const int dim_, padded_;
  const bool direct_;
  Read *copies_ = nullptr;
  const Read *tiles_[kSegmentTokens / kLanes];
};

template <typename Cache, int L> class PairKeys {
 public:
  static constexpr int kProductsPerKey = L;

  PairKeys(Scratch &scratch, int dim, int block_size, int num_tiles)
      : dim_(dim), rows_(scratch, dim, block_size), padded_(rows_.padded()),
        queries_(scratch.take<uint16_t>(size_t(num_tiles) * padded_ * L)) {}

  static void begin_tasks() { PairProducts<L>::begin_tasks(); }

  // queries_[tile][d / 2][lane] holds the pair (d, d + 1).
  void set_queries(int tile, const uint16_t *const *rows, int count) {
    uint16_t *to = queries_ + size_t(tile) * padded_ * L;
    for (int d = 0; d < padded_; d += 32) {
      __m512i pairs[L];
      for (int lane = 0; lane < L; ++lane)
        pairs[lane] = lane < count ? _mm512_maskz_loadu_epi16(first_of_32(dim_ - d), rows[lane] + d) : _mm512_setzero_si512();
      transpose_pairs(pairs);
      for (int i = 0; i < L; ++i) _mm512_storeu_si512(to + d * L + i * 32, pairs[i]);
    }
  }

  void load(const Cache *cache, const int64_t *rows, int begin, int end) { rows_.load(cache, rows, begin, end); }

  // products[key][L] of keys [begin, end), both multiples of 16.
  void multiply(int tile, int begin, int end, float *products, Prefetcher &ahead) const {
    PairProducts<L>::multiply_keys(rows_.tiles(), queries_ + size_t(tile) * padded_ * L, padded_, begin, end, products, ahead);
  }
  PlainProducts<L> products(int, const float *products) const { return {products}; }

 private:
  const int dim_;
  KeyRows<Cache, uint16_t> rows_;
  const int padded_;
  uint16_t *queries_;
};

#if BG_LEVEL >= 4

// Of each key and row the sums of either byte, int32 [key][2][L].
template <int L> struct QuadProducts {
  const float *products;
  Vec scale;

  Vec at(int key) const {
    const float *sums = products + key * 2 * L;
    __m512i high = _mm512_loadu_si512(sums), low = _mm512_loadu_si512(sums + kLanes);
    if constexpr (L == 4) {
      const __m512i evens = _mm512_setr_epi64(0, 1, 4, 5, 8, 9, 12, 13);
      const __m512i odds = _mm512_setr_epi64(2, 3, 6, 7, 10, 11, 14, 15), first = high;
      high = _mm512_permutex2var_epi64(first, evens, low), low = _mm512_permutex2var_epi64(first, odds, low);
    }
    return fma({_mm512_cvtepi32_ps(high)}, splat(256.0f), {_mm512_cvtepi32_ps(low)}) * scale;
  }
};

// int8 keys as they lie in the cache, met by queries of 16 bits, finer than bf16, in two bytes: q = (256 high + low) scale.
// Sums of either byte are exact.
template <int L> class QuadKeys {
 public:
  static constexpr int kProductsPerKey = 2 * L;

  QuadKeys(Scratch &scratch, int dim, int block_size, int num_tiles)
      : dim_(dim), rows_(scratch, dim, block_size), padded_(rows_.padded()),
        queries_(scratch.take<int8_t>(size_t(num_tiles) * padded_ * 2 * L)),
        scales_(scratch.take<float>(size_t(num_tiles) * L)) {
    std::memset(queries_, 0, size_t(num_tiles) * padded_ * 2 * L), std::fill_n(scales_, num_tiles * L, 0.0f);
  }

  static void begin_tasks() {
    TileShape shape;
    if constexpr (L == 4) {
      shape.bytes_per_row[0] = shape.bytes_per_row[1] = shape.bytes_per_row[2] = 32;
      shape.rows[5] = shape.rows[6] = shape.rows[7] = 4;
    }
    tile_configure(&shape);
  }

  // queries_[tile][d / 64][d % 64 / 4][2][lane] holds four high bytes, then four low ones; with sixteen lanes they are in
  // tiles of their own, [tile][d / 64][2][d % 64 / 4][lane].
  void set_queries(int tile, const uint16_t *const *rows, int count) {
    for (int lane = 0; lane < count; ++lane) set_query(tile, lane, rows[lane]);
  }

  void load(const int8_t *cache, const int64_t *rows, int begin, int end) { rows_.load(cache, rows, begin, end); }

  void multiply(int tile, int begin, int end, float *products, Prefetcher &fetches) const {
    Prefetcher ahead = fetches;
    const int8_t *q = queries_ + size_t(tile) * padded_ * 2 * L;
    for (int key = begin; key < end; key += 2 * kLanes)
      key + kLanes < end ? multiply_tiles<true>(q, key, products, ahead) : multiply_tiles<false>(q, key, products, ahead);
    fetches = ahead;
  }

  QuadProducts<L> products(int tile, const float *products) const {
    return {products, spread_rows<L>(scales_ + tile * L)};
  }

 private:
  static constexpr float kMost = 32512.0f;  // 127 * 256

  void set_query(int tile, int lane, const uint16_t *q) {
    const float top = largest_magnitude(q, dim_);
    const bool is_zero = top < kAsGoodAsZero;
    scales_[tile * L + lane] = is_zero ? 0.0f : top * (1 / kMost);
    const Vec inverse = splat(is_zero ? 0.0f : kMost / top);
    int8_t *to = queries_ + size_t(tile) * padded_ * 2 * L + lane * 4;
    for (int d = 0; d < dim_; d += kLanes) {
      const __m512i steps = _mm512_cvtps_epi32((load_as(q + d, std::min(kLanes, dim_ - d)) * inverse).x);
      const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(steps, _mm512_set1_epi32(128)), 8);
      alignas(16) int8_t bytes[2][kLanes];
      _mm_store_si128(reinterpret_cast<__m128i *>(bytes[0]), _mm512_cvtepi32_epi8(high));
      _mm_store_si128(reinterpret_cast<__m128i *>(bytes[1]), _mm512_cvtepi32_epi8(steps));  // signed: steps - 256 high
      for (int i = 0; i < kLanes; i += 4)
        for (int half = 0; half < 2; ++half) std::memcpy(to + place(d + i, half), bytes[half] + i, 4);
    }
  }

  // NaN where one of them is not finite: then all products are.
  static float largest_magnitude(const uint16_t *q, int dim) {
    __m512i most = _mm512_setzero_si512();
    for (int d = 0; d < dim; d += 32) {
      const __m512i row = _mm512_maskz_loadu_epi16(first_of_32(dim - d), q + d);
      most = _mm512_max_epu16(most, _mm512_and_si512(row, _mm512_set1_epi16(0x7fff)));
    }
    const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(most), _mm512_extracti64x4_epi64(most, 1));
    const __m128i quarter = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    // The smallest of eight is an instruction of its own.
    const int inverted = _mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(quarter, _mm_set1_epi16(-1))), 0);
    const uint32_t bits = uint32_t(~inverted & 0xffff) << 16;
    float top;
    std::memcpy(&top, &bits, sizeof top);
    return top < __builtin_inff() ? top : __builtin_nanf("");
  }

  static int place(int d, int half) {
    if constexpr (L == 4) return (d / 4 * 2 + half) * 16;
    return ((d / 64 * 2 + half) * 16 + d % 64 / 4) * 64;
  }

  // Keys of one or two tiles.
  template <bool two> void multiply_tiles(const int8_t *q, int key, float *products, Prefetcher &ahead) const {
    const int8_t *first = rows_.tiles()[key / kLanes], *second = two ? rows_.tiles()[key / kLanes + 1] : nullptr;
    const size_t stride = size_t(padded_);
    float *out = products + key * 2 * L, *next = out + kLanes * 2 * L;
    tile_zero<0>(), tile_zero<1>();
    if constexpr (L == 4) {
      for (int d = 0; d < padded_; d += 64) {
        tile_load<2>(q + d * 2 * L, 32);
        tile_load<3>(first + d, stride), tile_dot_signed<0, 3, 2>();
        if (two) tile_load<4>(second + d, stride), tile_dot_signed<1, 4, 2>();
        ahead.step(2 * kStepsPerTiles);
      }
      tile_store<0>(out, 32);
      if (two) tile_store<1>(next, 32);
    } else {
      if (two) tile_zero<2>(), tile_zero<3>();
      for (int d = 0; d < padded_; d += 64) {
        tile_load<4>(q + d * 2 * L, 64), tile_load<5>(q + d * 2 * L + 1024, 64);
        tile_load<6>(first + d, stride), tile_dot_signed<0, 6, 4>(), tile_dot_signed<1, 6, 5>();
        if (two) tile_load<7>(second + d, stride), tile_dot_signed<2, 7, 4>(), tile_dot_signed<3, 7, 5>();
      }
      tile_store<0>(out, 128), tile_store<1>(out + kLanes, 128);
      if (two) tile_store<2>(next, 128), tile_store<3>(next + kLanes, 128);
    }
  }

  const int dim_;
  KeyRows<int8_t, int8_t> rows_;
  const int padded_;
  int8_t *queries_;
  float *scales_;
};

template <typename Cache, int L>
using TileKeys = std::conditional_t<std::is_same_v<Cache, int8_t>, QuadKeys<L>, PairKeys<Cache, L>>;

#else

template <typename Cache, int L> using TileKeys = PairKeys<Cache, L>;

#endif
