// sample, top_tokens and token_ranks: a thread takes a row from its logits to its result. Included once per level,
// inside that level's namespace.

static inline float raw_logit(const LogitsArgs &in, int64_t r, int64_t token) {
  if (in.dtype == kFloat32) return static_cast<const float *>(in.logits)[r * in.stride + token];
  const uint32_t bits = uint32_t(static_cast<const uint16_t *>(in.logits)[r * in.stride + token]) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

static void divide(LogitsRow &row, float temperature) {
  Vec v[kGroupVectors];
  const Vec divisor = splat(temperature);
  for (int g = 0; g < row.groups; ++g) {
    get_group(row, g, v);
    for (int i = 0; i < kGroupVectors; ++i) v[i] = v[i] / divisor;
    set_group(row, g, v, true);
  }
}

static inline float temperature_of(const SampleArgs &args, int64_t r) {
  return args.temperature ? args.temperature[r] : 1.0f;
}
static inline int64_t top_k_of(const SampleArgs &args, int64_t r) { return args.top_k ? args.top_k[r] : 0; }
static inline bool is_greedy(const SampleArgs &args, int64_t r) {
  return args.greedy || temperature_of(args, r) == 0.0f || top_k_of(args, r) == 1;
}

static int choose_token(LogitsRow &row, const SampleArgs &args, int64_t r, float top) {
  if (is_greedy(args, r)) return row_best(row, top);
  const float temperature = temperature_of(args, r);
  const int64_t top_k = top_k_of(args, r);
  if (temperature != 1.0f) {
    divide(row, temperature > 1e-30f ? temperature : 1e-30f);
    top = row_top(row);
  }
  const Noise noise(args.keys + 5 * r, args.num_later);
  const float top_p = args.top_p ? args.top_p[r] : 1.0f, min_p = args.min_p ? args.min_p[r] : 0.0f;
  if (!(top_k > 0 && top_k < row.vocabulary) && top_p >= 1.0f && min_p <= 0.0f)
    return draw_token(row, nullptr, noise);
  const Cut cut = find_cut(row, top, top_k, top_p, min_p);
  drop_from_sums(row, cut);
  return draw_token(row, &cut, noise);
}

static void sample_row(LogitsRow &row, const SampleArgs &args, int64_t r) {
  load_logits(row, args.in, r);
  const float normalizer = row_sum(row);
  // A temperature finds all sums anew, and the best token needs none.
  if (has_edits(args.edits)) edit_row(row, args.edits, r, !is_greedy(args, r) && temperature_of(args, r) == 1.0f);
  const float top = row_top(row);
  const bool ok = top > -kInfinity && top < kInfinity;
  const int token = ok ? choose_token(row, args, r, top) : 0;
  args.token_ids[r] = token, args.ok[r] = ok;
  args.logprobs[r] = ok ? raw_logit(args.in, r, token) - normalizer : 0.0f;
}

static void sample(const SampleArgs &args) {
#pragma omp parallel for num_threads(args.in.num_threads) schedule(dynamic) if (args.in.rows > 1)
  for (int r = 0; r < args.in.rows; ++r) {
    Scratch &scratch = thread_scratch();
    scratch.reset();
    LogitsRow row = take_row(scratch, args.in.vocabulary);
    sample_row(row, args, r);
  }
}

// A number that orders as the score does; -0 counts as 0.
static inline uint32_t key_of(float score) {
  uint32_t bits;
  score += 0.0f;
  std::memcpy(&bits, &score, sizeof bits);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Largest score first, then lowest id; by Shell's method, since few tokens are asked for.
static void sort_entries(uint64_t *entries, int count) {
  for (int gap = count / 2; gap > 0; gap = gap == 2 ? 1 : gap * 5 / 11)
    for (int i = gap; i < count; ++i) {
      const uint64_t entry = entries[i];
      int j = i;
      for (; j >= gap && entries[j - gap] < entry; j -= gap) entries[j] = entries[j - gap];
      entries[j] = entry;
    }
}

// Ids of the `count` best tokens, in their order; the ids from 0 on where the row has no finite best.
static void best_tokens(LogitsRow &row, int count, Scratch &scratch, int64_t *token_ids) {
  const float top = row_top(row);
  if (!(top > -kInfinity && top < kInfinity)) {
    for (int i = 0; i < count; ++i) token_ids[i] = i;
    return;
  }
  const float kth = kth_largest(row, count);
  // Of the tokens that equal the last one there may be many.
  auto *entries = scratch.take<uint64_t>(size_t(row.vocabulary));
  int found = 0;
  for (int g = 0; g < row.groups; ++g) {
    if (!(row.tops[g] >= kth)) continue;
    for (int token = g * kGroupTokens; token < (g + 1) * kGroupTokens && token < row.vocabulary; ++token)
      if (row.x[token] >= kth) entries[found++] = uint64_t(key_of(row.x[token])) << 32 | uint32_t(~uint32_t(token));
  }
  sort_entries(entries, found);
  for (int i = 0; i < count; ++i) token_ids[i] = ~uint32_t(entries[i]) & 0xffffffffu;
}

static void top_tokens_row(LogitsRow &row, const TopTokensArgs &args, int64_t r, Scratch &scratch) {
  load_logits(row, args.in, r);
  const float normalizer = row_sum(row);
  const bool edited = has_edits(args.edits);
  if (edited) {
    subtract(row, normalizer);
    edit_row(row, args.edits, r, false);
  }
  const float top = row_top(row);
  const bool usable = top > -kInfinity && top < kInfinity;
  best_tokens(row, args.count, scratch, args.token_ids + r * args.count);
  for (int64_t at = r * args.count; at < (r + 1) * args.count; ++at) {
    const int64_t token = args.token_ids[at];
    args.logprobs[at] = usable ? raw_logit(args.in, r, token) - normalizer : -kInfinity;
    args.scores[at] = edited && usable ? row.x[token] : args.logprobs[at];
  }
}

static void top_tokens(const TopTokensArgs &args) {
#pragma omp parallel for num_threads(args.in.num_threads) schedule(dynamic) if (args.in.rows > 1)
  for (int r = 0; r < args.in.rows; ++r) {
    Scratch &scratch = thread_scratch();
    scratch.reset();
    LogitsRow row = take_row(scratch, args.in.vocabulary);
    top_tokens_row(row, args, r, scratch);
  }
}

// 1 + the tokens that are more likely, and those as likely with lower ids.
static int64_t rank_of(const LogitsRow &row, int token) {
  const float score = row.x[token];
  int64_t rank = 1;
  for (int g = 0; g < row.groups; ++g) {
    if (row.tops[g] < score) continue;
    for (int i = 0; i < kGroupVectors; ++i) {
      const int first = g * kGroupTokens + i * kLanes;
      const Vec v = load(row.x + first);
      const Mask more = greater(v, splat(score)), as_much = at_least(v, splat(score));
      const int before = token - first;
      const Mask lower = before >= kLanes ? first_lanes(kLanes) : before > 0 ? first_lanes(before) : Mask(0);
      rank += __builtin_popcount(Mask((as_much & lower) | (more & ~lower)));
    }
  }
  return rank;
}

static void token_ranks_row(LogitsRow &row, const TokenRanksArgs &args, int64_t r, Scratch &scratch) {
  load_logits(row, args.in, r);
  const float normalizer = row_sum(row), top = row_top(row);
  const bool usable = top > -kInfinity && top < kInfinity;
  for (int64_t at = r * args.count; at < (r + 1) * args.count; ++at) {
    args.logprobs[at] = row.x[args.token_ids[at]] - normalizer;
    args.ranks[at] = rank_of(row, int(args.token_ids[at]));
  }
  if (!args.best_count) return;
  best_tokens(row, args.best_count, scratch, args.best_ids + r * args.best_count);
  for (int64_t at = r * args.best_count; at < (r + 1) * args.best_count; ++at)
    args.best_logprobs[at] = usable ? row.x[args.best_ids[at]] - normalizer : -kInfinity;
}

static void token_ranks(const TokenRanksArgs &args) {
#pragma omp parallel for num_threads(args.in.num_threads) schedule(dynamic) if (args.in.rows > 1)
  for (int r = 0; r < args.in.rows; ++r) {
    Scratch &scratch = thread_scratch();
    scratch.reset();
    LogitsRow row = take_row(scratch, args.in.vocabulary);
    token_ranks_row(row, args, r, scratch);
  }
}
