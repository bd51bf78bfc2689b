// One row of logits in fp32 and what is known of its groups of kGroupTokens; edits of single logits. Included once per
// level, inside that level's namespace. No std algorithm is used: its code could be shared between levels.

constexpr float kInfinity = __builtin_inff();
constexpr int kGroupVectors = kGroupTokens / kLanes;

struct LogitsRow {
  float *x;         // [G * kGroupTokens], -inf past the vocabulary
  float *tops;      // [G] the largest of each group; +inf where one is NaN or +inf
  float *sums;      // [G] log-sum-exp of each group
  float *buffer;    // [G * kGroupTokens], for candidates
  float *masses;    // the same
  uint8_t *edited;  // [G]
  int groups, vocabulary;
};

static inline LogitsRow take_row(Scratch &scratch, int vocabulary) {
  LogitsRow row;
  row.vocabulary = vocabulary, row.groups = (vocabulary + kGroupTokens - 1) / kGroupTokens;
  const size_t padded = size_t(row.groups) * kGroupTokens, groups = size_t(row.groups + kLanes - 1) / kLanes * kLanes;
  row.x = scratch.take<float>(padded), row.buffer = scratch.take<float>(padded), row.masses = scratch.take<float>(padded);
  row.tops = scratch.take<float>(groups), row.sums = scratch.take<float>(groups);
  row.edited = scratch.take<uint8_t>(groups);
  for (size_t g = size_t(row.groups); g < groups; ++g) row.tops[g] = row.sums[g] = -kInfinity;
  return row;
}

// First lanes of a vector.
static inline Mask first_lanes(int n) { return Mask((1u << n) - 1u); }

static inline float log_sum_exp(const Vec *v, int count, float top) {
  if (!(top > -kInfinity && top < kInfinity)) return top;
  Vec sum = zero();
  for (int i = 0; i < count; ++i) sum = sum + exp(v[i] - splat(top));
  return top + __builtin_logf(reduce_add(sum));
}

// Store a group and note its top, and its sum unless that is not wanted.
static inline void set_group(LogitsRow &row, int group, const Vec *v, bool summed) {
  Vec largest = v[0];
  Mask finite = greater(splat(kInfinity), v[0]);
  for (int i = 1; i < kGroupVectors; ++i) {
    largest = max(largest, v[i]);
    finite = Mask(finite & greater(splat(kInfinity), v[i]));
  }
  float *x = row.x + size_t(group) * kGroupTokens;
  for (int i = 0; i < kGroupVectors; ++i) store(x + i * kLanes, v[i]);
  const float top = finite == first_lanes(kLanes) ? reduce_max(largest) : kInfinity;
  row.tops[group] = top;
  if (summed) row.sums[group] = log_sum_exp(v, kGroupVectors, top);
}

static inline void get_group(const LogitsRow &row, int group, Vec *v) {
  for (int i = 0; i < kGroupVectors; ++i) v[i] = load(row.x + size_t(group) * kGroupTokens + i * kLanes);
}

// Logits that are fetched ahead: a row is longer than the caches, and its exponentials take as long as reading it.
constexpr int kAheadTokens = 1024;

template <typename T> static inline void load_logits(LogitsRow &row, const T *logits) {
  Vec v[kGroupVectors];
  for (int g = 0; g < row.groups; ++g) {
    const T *from = logits + size_t(g) * kGroupTokens;
    const int held = row.vocabulary - g * kGroupTokens;
    for (int i = 0; i < kGroupVectors; ++i) {
      __builtin_prefetch(from + kAheadTokens + i * kLanes);
      const int lanes = held - i * kLanes;
      if (lanes >= kLanes) v[i] = load_as(from + i * kLanes);
      else if (lanes > 0) v[i] = select(first_lanes(lanes), load_as(from + i * kLanes, lanes), splat(-kInfinity));
      else v[i] = splat(-kInfinity);
    }
    set_group(row, g, v, true);
  }
}

static inline void load_logits(LogitsRow &row, const LogitsArgs &in, int64_t r) {
  if (in.dtype == kFloat32) load_logits(row, static_cast<const float *>(in.logits) + r * in.stride);
  else load_logits(row, static_cast<const uint16_t *>(in.logits) + r * in.stride);
}

static inline float row_top(const LogitsRow &row) {
  Vec largest = load(row.tops);
  for (int g = kLanes; g < row.groups; g += kLanes) largest = max(largest, load(row.tops + g));
  return reduce_max(largest);
}

// Log-sum-exp of the whole row, from its groups; what it is where a logit is NaN or +inf does not matter.
static inline float row_sum(const LogitsRow &row) {
  Vec largest = load(row.sums);
  for (int g = kLanes; g < row.groups; g += kLanes) largest = max(largest, load(row.sums + g));
  const float top = reduce_max(largest);
  if (!(top > -kInfinity && top < kInfinity)) return top;
  Vec sum = zero();
  for (int g = 0; g < row.groups; g += kLanes) sum = sum + exp(load(row.sums + g) - splat(top));
  return top + __builtin_logf(reduce_add(sum));
}

// Lowest id of the largest logit.
static inline int row_best(const LogitsRow &row, float top) {
  int group = 0;
  while (row.tops[group] != top) ++group;
  const float *x = row.x + size_t(group) * kGroupTokens;
  int token = 0;
  while (x[token] != top) ++token;
  return group * kGroupTokens + token;
}

// x - a for all; tops follow, sums do not.
static inline void subtract(LogitsRow &row, float a) {
  Vec v[kGroupVectors];
  for (int g = 0; g < row.groups; ++g) {
    get_group(row, g, v);
    for (int i = 0; i < kGroupVectors; ++i) v[i] = v[i] - splat(a);
    set_group(row, g, v, false);
  }
}

static inline bool has_edits(const EditArgs &edits) { return edits.bias_starts || edits.count_starts; }

// Bias, then the penalties; tops and (if `summed`) sums of the groups that are touched are found anew.
static inline void edit_row(LogitsRow &row, const EditArgs &edits, int64_t r, bool summed) {
  std::memset(row.edited, 0, size_t(row.groups));
  if (edits.bias_starts)
    for (int64_t n = edits.bias_starts[r]; n < edits.bias_starts[r + 1]; ++n) {
      const int64_t token = edits.bias_tokens[n];
      row.x[token] += edits.bias_values[n], row.edited[token / kGroupTokens] = 1;
    }
  if (edits.count_starts) {
    const float repetition = edits.repetition ? edits.repetition[r] : 1.0f;
    const float presence = edits.presence ? edits.presence[r] : 0.0f;
    const float frequency = edits.frequency ? edits.frequency[r] : 0.0f;
    for (int64_t n = edits.count_starts[r]; n < edits.count_starts[r + 1]; ++n) {
      const int64_t token = edits.count_tokens[n];
      float x = row.x[token];
      if (edits.repetition) x = x > 0 ? x / repetition : x * repetition;
      x = x - frequency * float(edits.counts[n]);
      row.x[token] = x - (edits.counts[n] > 0 ? presence : 0.0f), row.edited[token / kGroupTokens] = 1;
    }
  }
  Vec v[kGroupVectors];
  for (int g = 0; g < row.groups; ++g)
    if (row.edited[g]) get_group(row, g, v), set_group(row, g, v, summed);
}
