// One segment for sixteen rows: scores to weights, and the merge of partial results in segment order.
// Included once per level, inside that level's namespace, after vec.h.

// Finite, so that a row which has seen nothing yet merges without NaN: (-1e30) - (-1e30) = 0.
constexpr float kNothing = -1e30f;

// The segment-local keys [begin, end) that each lane may see.
struct LaneRange {
  Vec begin, end;
  int first, last;  // the union of all lanes; empty if first >= last
  bool whole;       // every lane sees the whole segment
  Mask lanes_that_see(int key) const { return greater(end, splat(float(key))) & ~greater(begin, splat(float(key))); }
};

// The keys of `segment` seen from sixteen positions; window 0 is none.
static inline LaneRange visible_keys(const int32_t *positions, int segment, int window) {
  float begin[kLanes], end[kLanes];
  int first = kSegmentTokens, last = 0, latest_begin = 0, earliest_end = kSegmentTokens;
  for (int lane = 0; lane < kLanes; ++lane) {
    const int stop = positions[lane] + 1 - segment * kSegmentTokens;
    const int to = std::clamp(stop, 0, kSegmentTokens);
    const int from = window ? std::clamp(stop - window, 0, kSegmentTokens) : 0;
    begin[lane] = float(from), end[lane] = float(to);
    latest_begin = std::max(latest_begin, from), earliest_end = std::min(earliest_end, to);
    if (from < to) first = std::min(first, from), last = std::max(last, to);
  }
  return {load(begin), load(end), first, last, latest_begin == 0 && earliest_end == kSegmentTokens};
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

// Turns products[key][lane] of keys [key_begin, key_end) into e^(score - max) in place; a key that a lane does not see
// weighs 0. Returns each lane's maximum and sum. A lane's result depends on the keys it sees alone.
static inline void weigh_keys(float *products, int key_begin, int key_end, const LaneRange &range, const ScoreRule &rule,
                              Vec &maximum, Vec &sum) {
  maximum = splat(kNothing);
  for (int key = key_begin; key < key_end; ++key) {
    float *row = products + key * kLanes;
    Vec score = load(row) * splat(rule.scale);
    if (rule.key_scale) score = score * splat(rule.key_scale[key]);
    if (rule.softcap != 0) score = soft_cap(score, rule.softcap);
    if (!range.whole) score = select(range.lanes_that_see(key), score, splat(kNothing));
    maximum = max(maximum, score);
    store(row, score);
  }
  Vec sums[4] = {zero(), zero(), zero(), zero()};
  for (int key = key_begin; key < key_end; ++key) {
    float *row = products + key * kLanes;
    const Vec score = load(row);
    Vec weight = exp(score - maximum);
    if (!range.whole) weight = select(greater(splat(kNothing / 2), score), zero(), weight);
    sums[key % 4] = sums[key % 4] + weight;
    if (rule.value_scale) weight = weight * splat(rule.value_scale[key]);
    store(row, weight);
  }
  sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Running result of sixteen rows over the segments seen so far.
struct RowState {
  float maximum[kLanes], sum[kLanes];
  float *values;  // [kLanes, width]
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
