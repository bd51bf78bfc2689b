// The k-th largest score, and what top-k, top-p and min-p keep, without a sort. Included once per level, inside that
// level's namespace.

static inline Mask at_least(Vec a, Vec b) { return Mask(~greater(b, a)); }  // none is NaN

// The lanes of m, one after another; writes a whole vector.
static inline void compress(float *to, Vec v, Mask m) {
#if BG_LEVEL >= 2
  _mm512_storeu_ps(to, _mm512_maskz_compress_ps(m, v.x));
#else
  float lanes[kLanes];
  store(lanes, v);
  int n = 0;
  for (unsigned rest = m; rest; rest &= rest - 1) to[n++] = lanes[__builtin_ctz(rest)];
#endif
}

// Numbers in any order, each with a weight, 1 where `weights` is null; the memory ends with a whole vector.
struct Weighted {
  float *scores, *weights;
  int count;
};

static inline Mask held_lanes(const Weighted &x, int i) {
  return x.count - i < kLanes ? first_lanes(x.count - i) : first_lanes(kLanes);
}

static inline float total_weight(const Weighted &x) {
  Vec sum = zero();
  for (int i = 0; i < x.count; i += kLanes) sum = sum + select(held_lanes(x, i), load(x.weights + i), zero());
  return reduce_add(sum);
}

// Parted at a pivot.
struct Parts {
  float above, equal;  // weights
  int num_equal;
};

static inline Parts part(const Weighted &x, float pivot) {
  Vec above = zero(), equal = zero();
  int num_above = 0, num_equal = 0;
  for (int i = 0; i < x.count; i += kLanes) {
    const Vec score = load(x.scores + i);
    const Mask larger = Mask(greater(score, splat(pivot)) & held_lanes(x, i));
    const Mask same = Mask(at_least(score, splat(pivot)) & ~larger & held_lanes(x, i));
    num_above += __builtin_popcount(larger), num_equal += __builtin_popcount(same);
    if (!x.weights) continue;
    const Vec weight = load(x.weights + i);
    above = above + select(larger, weight, zero()), equal = equal + select(same, weight, zero());
  }
  if (!x.weights) return {float(num_above), float(num_equal), num_equal};
  return {reduce_add(above), reduce_add(equal), num_equal};
}

// Leave the numbers above the pivot, or those below it.
static inline void keep(Weighted &x, float pivot, bool upper) {
  int kept = 0;
  for (int i = 0; i < x.count; i += kLanes) {
    const Vec score = load(x.scores + i);
    const Mask side = upper ? greater(score, splat(pivot)) : greater(splat(pivot), score), m = Mask(side & held_lanes(x, i));
    compress(x.scores + kept, score, m);
    if (x.weights) compress(x.weights + kept, load(x.weights + i), m);
    kept += __builtin_popcount(m);
  }
  x.count = kept;
}

static inline float median(float a, float b, float c) {
  const float low = a < b ? a : b, high = a < b ? b : a;
  return c < low ? low : c > high ? high : c;
}

// The largest score from which on the weights sum to `wanted`; -inf if there is none.
struct Border {
  float score;
  float above;  // weight of the larger scores
  int equal;    // how many have just this score
};

// By parting again and again (Hoare's Find); x is used up.
static Border find_border(Weighted x, float wanted) {
  float above = 0.0f;
  while (x.count > 0) {
    const float pivot = median(x.scores[x.count / 4], x.scores[x.count / 2], x.scores[x.count - 1 - x.count / 4]);
    const Parts parts = part(x, pivot);
    const bool upper = above + parts.above >= wanted;
    if (!upper && above + parts.above + parts.equal >= wanted) return {pivot, above + parts.above, parts.num_equal};
    if (!upper) above += parts.above + parts.equal;
    keep(x, pivot, upper);
  }
  return {-kInfinity, above, 0};
}

// Scores from `floor` on, in row.buffer.
static Weighted collect(LogitsRow &row, float floor) {
  int count = 0;
  for (int g = 0; g < row.groups; ++g) {
    if (!(row.tops[g] >= floor)) continue;
    for (int i = 0; i < kGroupVectors; ++i) {
      const Vec v = load(row.x + size_t(g) * kGroupTokens + i * kLanes);
      const Mask m = at_least(v, splat(floor));
      if (!m) continue;
      compress(row.buffer + count, v, m);
      count += __builtin_popcount(m);
    }
  }
  return {row.buffer, nullptr, count};
}

// The k-th largest of the groups' tops: at least k scores are as large.
static float kth_top(LogitsRow &row, int k) {
  std::memcpy(row.buffer, row.tops, sizeof(float) * size_t(row.groups));
  return find_border({row.buffer, nullptr, row.groups}, float(k)).score;
}

static float kth_largest(LogitsRow &row, int k) {
  return find_border(collect(row, k <= row.groups ? kth_top(row, k) : -kInfinity), float(k)).score;
}

// What the filters leave: scores from `lowest` on, and of those equal to `tie` the ids up to `last`.
struct Cut {
  float lowest, tie;
  int last;
};

static inline Mask kept_lanes(Vec v, int first_token, const Cut &cut) {
  const Mask kept = at_least(v, splat(cut.lowest));
  if (first_token + kLanes - 1 <= cut.last) return kept;
  const int before = cut.last - first_token + 1;
  const Mask tied = Mask(at_least(v, splat(cut.tie)) & at_least(splat(cut.tie), v));
  return Mask(kept & ~(tied & ~(before > 0 ? first_lanes(before) : Mask(0))));
}

// exp(score - top) of what was collected; of -inf it is e^-87, which no sum with exp(0) feels.
static void weigh(LogitsRow &row, Weighted &x, float top) {
  x.weights = row.masses;
  for (int i = 0; i < x.count; i += kLanes) store(x.weights + i, exp(load(x.scores + i) - splat(top)));
}

static inline float exp_of(float a) {
  float lanes[kLanes];
  store(lanes, exp(splat(a)));
  return lanes[0];
}

// Id of the n-th token, from id 0 on and n from 1, whose score is `score`.
static int nth_equal(const LogitsRow &row, float score, int n) {
  for (int g = 0; g < row.groups; ++g) {
    if (row.tops[g] < score) continue;
    const float *x = row.x + size_t(g) * kGroupTokens;
    for (int i = 0; i < kGroupTokens; ++i)
      if (x[i] == score && --n == 0) return g * kGroupTokens + i;
  }
  return row.vocabulary;
}

// So many of the largest scores that their mass reaches `wanted`: few where the likely tokens are few.
static Weighted collect_mass(LogitsRow &row, float top, float wanted) {
  float depth = top - kth_top(row, row.groups < 4 ? row.groups : 4);
  for (int tries = 0; tries < 5 && depth > 0.0f; ++tries, depth *= 2.0f) {
    Weighted x = collect(row, top - depth);
    weigh(row, x, top);
    if (total_weight(x) >= wanted) return x;
  }
  Weighted x = collect(row, -kInfinity);
  weigh(row, x, top);
  return x;
}

// Keep the most likely tokens of those above cut.lowest whose share reaches top_p.
static void cut_mass(LogitsRow &row, float top, float top_p, Cut &cut) {
  Weighted x;
  float wanted;
  if (cut.lowest > -kInfinity) {
    x = collect(row, cut.lowest);
    weigh(row, x, top);
    wanted = top_p * total_weight(x);
  } else {
    wanted = top_p * exp_of(row_sum(row) - top);
    x = collect_mass(row, top, wanted);
  }
  const Border border = find_border(x, wanted);
  // Where rounding leaves no border with enough, nothing is cut.
  if (!(border.score > -kInfinity)) return;
  cut.lowest = border.score;
  const float needed = __builtin_ceilf((wanted - border.above) / exp_of(border.score - top));
  if (needed < float(border.equal)) cut.tie = border.score, cut.last = nth_equal(row, cut.tie, needed > 1 ? int(needed) : 1);
}

// top-k, then top-p of the rest, then min-p. `top` is finite; row.sums are those of the whole row.
static Cut find_cut(LogitsRow &row, float top, int64_t top_k, float top_p, float min_p) {
  Cut cut = {-kInfinity, -kInfinity, row.vocabulary};
  if (top_k > 0 && top_k < row.vocabulary) cut.lowest = kth_largest(row, int(top_k));
  if (top_p < 1.0f) cut_mass(row, top, top_p, cut);
  if (min_p > 0.0f) {
    const float floor = top + __builtin_logf(min_p);
    cut.lowest = floor > cut.lowest ? floor : cut.lowest;
  }
  return cut;
}
