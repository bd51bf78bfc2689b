// One segment for some rows: scores to weights, and the merge of partial results in segment order.
// Included once per level, inside that level's namespace, after vec.h.
//
// A vector holds one key for sixteen rows or, for up to four rows, four keys (L: rows per key, 16 or 4). Lanes are
// independent and sums keep one order, so a row's result is the same bits in both.

// Finite, so that a row which has seen nothing yet merges without NaN: (-1e30) - (-1e30) = 0.
constexpr float kNothing = -1e30f;

template <int L> static inline Vec spread_rows(const float *rows) {
  if constexpr (L == kLanes) return load(rows);
  return repeat_quad(rows);
}
template <int L> static inline Vec spread_keys(const float *keys) {
  if constexpr (L == kLanes) return splat(keys[0]);
  return stretch_quad(keys);
}

// The segment-local keys [begin, end) that each lane may see.
struct LaneRange {
  Vec begin, end;
  int first, last;  // the union of all lanes; empty if first >= last
  bool whole;       // every lane sees the whole segment

  template <int L> Mask lanes_that_see(int key) const {
    const float offsets[4] = {0, 1, 2, 3};
    const Vec keys = splat(float(key)) + spread_keys<L>(offsets);
    return greater(end, keys) & ~greater(begin, keys);
  }
};

// The keys of `segment` seen from L positions; window 0 is none.
template <int L> static inline LaneRange visible_keys(const int32_t *positions, int segment, int window) {
  float begin[L], end[L];
  int first = kSegmentTokens, last = 0, latest_begin = 0, earliest_end = kSegmentTokens;
  for (int lane = 0; lane < L; ++lane) {
    const int stop = positions[lane] + 1 - segment * kSegmentTokens;
    const int to = std::clamp(stop, 0, kSegmentTokens);
    const int from = window ? std::clamp(stop - window, 0, kSegmentTokens) : 0;
    begin[lane] = float(from), end[lane] = float(to);
    latest_begin = std::max(latest_begin, from), earliest_end = std::min(earliest_end, to);
    if (from < to) first = std::min(first, from), last = std::max(last, to);
  }
  const bool whole = latest_begin == 0 && earliest_end == kSegmentTokens;
  return {spread_rows<L>(begin), spread_rows<L>(end), first, last, whole};
}

struct ScoreRule {
  float scale, softcap;
  const float *key_scale, *value_scale;  // [kSegmentTokens] or null
};

static inline Vec soft_cap(Vec score, float cap) {
  // tanh(x) = 1 - 2 / (e^2x + 1)
  const Vec bounded = max(splat(-40.0f), score * splat(2.0f / cap));
  const Vec power = exp(select(greater(bounded, splat(40.0f)), splat(40.0f), bounded));
  return (splat(1.0f) - splat(2.0f) / (power + splat(1.0f))) * splat(cap);
}

// Products as they are: [key][L].
template <int L> struct PlainProducts {
  const float *products;
  Vec at(int key) const { return load(products + key * L); }
};

// Turns the products of keys [key_begin, key_end), multiples of 16, into weights[key][L], e^(score - max); a key that a lane
// does not see weighs 0. Returns each lane's maximum and sum, which depend on the keys it sees alone. kPlain: all lanes
// see all keys, and scores are products times the scale. Weights may overwrite products of keys that were read.
template <int L, bool kPlain, class Products>
static inline void weigh_seen_keys(const Products &products, float *weights, int key_begin, int key_end, const LaneRange &range,
                                   const ScoreRule &rule, Prefetcher &fetches, Vec &maximum, Vec &sum) {
  constexpr int kKeys = kLanes / L, kVectors = 4;  // in flight
  Prefetcher ahead = fetches;
  const Vec scale = splat(rule.scale);
  Vec highest[kVectors];
  for (int i = 0; i < kVectors; ++i) highest[i] = splat(kNothing);
  for (int first = key_begin; first < key_end; first += kVectors * kKeys)
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      const int key = first + i * kKeys;
      Vec score = products.at(key) * scale;
      if constexpr (!kPlain) {
        if (rule.key_scale) score = score * spread_keys<L>(rule.key_scale + key);
        if (rule.softcap != 0) score = soft_cap(score, rule.softcap);
        if (!range.whole) score = select(range.lanes_that_see<L>(key), score, splat(kNothing));
      }
      if constexpr (!kPlain || !std::is_same_v<Products, PlainProducts<L>>) store(weights + key * L, score);
      highest[i] = max(highest[i], score);
      ahead.step();
    }
  Vec top = max(max(highest[0], highest[1]), max(highest[2], highest[3]));
  if constexpr (L < kLanes) top = fold_groups(top, [](Vec a, Vec b) { return max(a, b); });
  constexpr int kSums = 4 / kKeys;
  Vec sums[kSums];  // of the keys that are equal modulo four
  for (int i = 0; i < kSums; ++i) sums[i] = zero();
  for (int first = key_begin; first < key_end; first += kVectors * kKeys)
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      const int key = first + i * kKeys;
      Vec score = load(weights + key * L);
      if constexpr (kPlain && std::is_same_v<Products, PlainProducts<L>>) score = score * scale;
      Vec weight = exp(score - top);
      if constexpr (!kPlain)
        if (!range.whole) weight = select(greater(splat(kNothing / 2), score), zero(), weight);
      sums[i % kSums] = sums[i % kSums] + weight;
      if constexpr (!kPlain)
        if (rule.value_scale) weight = weight * spread_keys<L>(rule.value_scale + key);
      store(weights + key * L, weight);
      ahead.step();
    }
  fetches = ahead;
  maximum = top;
  if constexpr (L == kLanes)
    sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  else
    sum = fold_groups(sums[0], [](Vec a, Vec b) { return a + b; });
}

template <int L, class Products>
static inline void weigh_keys(const Products &products, float *weights, int key_begin, int key_end, const LaneRange &range,
                              const ScoreRule &rule, Prefetcher &ahead, Vec &maximum, Vec &sum) {
  if (range.whole && !rule.key_scale && rule.softcap == 0)
    weigh_seen_keys<L, true>(products, weights, key_begin, key_end, range, rule, ahead, maximum, sum);
  else
    weigh_seen_keys<L, false>(products, weights, key_begin, key_end, range, rule, ahead, maximum, sum);
}

// Running result of L rows over the segments seen so far.
struct RowState {
  float maximum[kLanes], sum[kLanes];  // repeated where L is 4
  float *values;                       // [L, width]
};

__attribute__((noinline)) static void merge_segment(RowState &state, const float *segment_values, int num_rows,
                                                    int width, Vec maximum, Vec sum) {
  const Vec before = load(state.maximum), now = max(before, maximum);
  float keep[kLanes], add[kLanes];
  const Vec keep_lanes = exp(before - now), add_lanes = exp(maximum - now);
  store(keep, keep_lanes), store(add, add_lanes);
  store(state.maximum, now);
  store(state.sum, fma(load(state.sum), keep_lanes, sum * add_lanes));
  for (int row = 0; row < num_rows; ++row) {
    const Vec k = splat(keep[row]), a = splat(add[row]);
    float *values = state.values + row * width;
    const float *more = segment_values + row * width;
    for (int d = 0; d < width; d += kLanes) store(values + d, fma(load(more + d), a, load(values + d) * k));
  }
}
