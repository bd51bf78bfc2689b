// The products of PairTile on AMX tiles. Included once, inside the AMX level's namespace.

template <int L> struct PairProducts;

// Of Prefetcher, beside a few tiles of four rows. With sixteen rows there is arithmetic enough elsewhere, and fetching only
// delays the operands.
constexpr int kStepsPerTiles = 4;

// Sixteen rows: every tile is [16, 64 bytes].
template <> struct PairProducts<16> {
  static void begin_tasks() {
    const TileShape shape;
    tile_configure(&shape);
  }

  static int num_steps(int, int) { return 0; }

  static void multiply_keys(const uint16_t *const *key_rows, const uint16_t *q, int dim, int begin, int end, float *products,
                            Prefetcher &) {
    const size_t stride = size_t(dim) * sizeof(uint16_t);
    if (end - begin == kSegmentTokens) {
      tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
      for (int d = 0; d < dim; d += 32) {
        tile_load<4>(q + d * 16, 64);
        tile_load<5>(key_rows[0] + d, stride), tile_dot_bf16<0, 5, 4>();
        tile_load<6>(key_rows[1] + d, stride), tile_dot_bf16<1, 6, 4>();
        tile_load<7>(key_rows[2] + d, stride), tile_dot_bf16<2, 7, 4>();
        tile_load<5>(key_rows[3] + d, stride), tile_dot_bf16<3, 5, 4>();
      }
      tile_store<0>(products, 64), tile_store<1>(products + 256, 64);
      tile_store<2>(products + 512, 64), tile_store<3>(products + 768, 64);
      return;
    }
    for (int key = begin; key < end; key += 16) {
      tile_zero<0>();
      for (int d = 0; d < dim; d += 32) {
        tile_load<4>(q + d * 16, 64);
        tile_load<5>(key_rows[key / 16] + d, stride), tile_dot_bf16<0, 5, 4>();
      }
      tile_store<0>(products + key * 16, 64);
    }
  }

  static void weigh_values(const uint16_t *weights, const uint16_t *values, int width, int, int begin, int end, float *out,
                           Prefetcher &) {
    const size_t row_bytes = size_t(width) * sizeof(float);
    int d = 0;
    for (; d + 64 <= width; d += 64) {
      tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
      for (int half = begin / 32 * 32; half < end; half += 32) {
        const uint16_t *pairs = values + size_t(half) * width + d * 2;
        tile_load<4>(weights + half, kSegmentTokens * sizeof(uint16_t));
        tile_load<5>(pairs, row_bytes), tile_dot_bf16<0, 4, 5>();
        tile_load<6>(pairs + 32, row_bytes), tile_dot_bf16<1, 4, 6>();
        tile_load<7>(pairs + 64, row_bytes), tile_dot_bf16<2, 4, 7>();
        tile_load<5>(pairs + 96, row_bytes), tile_dot_bf16<3, 4, 5>();
      }
      tile_store<0>(out + d, row_bytes), tile_store<1>(out + d + 16, row_bytes);
      tile_store<2>(out + d + 32, row_bytes), tile_store<3>(out + d + 48, row_bytes);
    }
    if (d == width) return;
    tile_zero<0>(), tile_zero<1>();
    for (int half = begin / 32 * 32; half < end; half += 32) {
      const uint16_t *pairs = values + size_t(half) * width + d * 2;
      tile_load<4>(weights + half, kSegmentTokens * sizeof(uint16_t));
      tile_load<5>(pairs, row_bytes), tile_dot_bf16<0, 4, 5>();
      tile_load<6>(pairs + 32, row_bytes), tile_dot_bf16<1, 4, 6>();
    }
    tile_store<0>(out + d, row_bytes), tile_store<1>(out + d + 16, row_bytes);
  }
};

// Four rows: tiles 0 to 2 are [16 keys or pairs, 4 rows], 3 and 4 whole, 5 to 7 [4 rows, 64 bytes].
template <> struct PairProducts<4> {
  static void begin_tasks() {
    TileShape shape;
    shape.bytes_per_row[0] = shape.bytes_per_row[1] = shape.bytes_per_row[2] = 16;
    shape.rows[5] = shape.rows[6] = shape.rows[7] = 4;
    tile_configure(&shape);
  }

  static int num_steps(int dim, int width) { return (dim + width) / 32 * (kSegmentTokens / 32) * kStepsPerTiles; }

  static void multiply_keys(const uint16_t *const *key_rows, const uint16_t *q, int dim, int begin, int end, float *products,
                            Prefetcher &fetches) {
    Prefetcher ahead = fetches;
    const size_t stride = size_t(dim) * sizeof(uint16_t);
    int key = begin;
    for (; key + 32 <= end; key += 32) {
      tile_zero<0>(), tile_zero<1>();
      for (int d = 0; d < dim; d += 32) {
        tile_load<2>(q + d * 4, 16);
        tile_load<3>(key_rows[key / 16] + d, stride), tile_dot_bf16<0, 3, 2>();
        tile_load<4>(key_rows[key / 16 + 1] + d, stride), tile_dot_bf16<1, 4, 2>();
        ahead.step(kStepsPerTiles);
      }
      tile_store<0>(products + key * 4, 16), tile_store<1>(products + key * 4 + 64, 16);
    }
    fetches = ahead;
    if (key == end) return;
    tile_zero<0>();
    for (int d = 0; d < dim; d += 32) {
      tile_load<2>(q + d * 4, 16);
      tile_load<3>(key_rows[key / 16] + d, stride), tile_dot_bf16<0, 3, 2>();
    }
    tile_store<0>(products + key * 4, 16);
  }

  static void weigh_values(const uint16_t *weights, const uint16_t *values, int width, int, int begin, int end, float *out,
                           Prefetcher &fetches) {
    Prefetcher ahead = fetches;
    const size_t row_bytes = size_t(width) * sizeof(float);
    for (int d = 0; d < width; d += 32) {
      tile_zero<6>(), tile_zero<7>();
      for (int half = begin / 32 * 32; half < end; half += 32) {
        const uint16_t *pairs = values + size_t(half) * width + d * 2;
        tile_load<5>(weights + half, kSegmentTokens * sizeof(uint16_t));
        tile_load<3>(pairs, row_bytes), tile_dot_bf16<6, 5, 3>();
        tile_load<4>(pairs + 32, row_bytes), tile_dot_bf16<7, 5, 4>();
        ahead.step(kStepsPerTiles);
      }
      tile_store<6>(out + d, row_bytes), tile_store<7>(out + d + 16, row_bytes);
    }
    fetches = ahead;
  }
};
