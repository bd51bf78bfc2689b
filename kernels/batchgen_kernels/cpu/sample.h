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

static int choose_token(LogitsRow &row, const SampleArgs &args, int64_t r, float top) {
  const float temperature = args.temperature ? args.temperature[r] : 1.0f;
  const int64_t top_k = args.top_k ? args.top_k[r] : 0;
  if (args.greedy || temperature == 0.0f || top_k == 1) return row_best(row, top);
  if (temperature != 1.0f) {
    divide(row, temperature > 1e-30f ? temperature : 1e-30f);
    top = row_top(row);
  }
  const float top_p = args.top_p ? args.top_p[r] : 1.0f, min_p = args.min_p ? args.min_p[r] : 0.0f;
  if (!(top_k > 0 && top_k < row.vocabulary) && top_p >= 1.0f && min_p <= 0.0f)
    return draw_token(row, nullptr, args.keys + 5 * r);
  const Cut cut = find_cut(row, top, top_k, top_p, min_p);
  drop_from_sums(row, cut);
  return draw_token(row, &cut, args.keys + 5 * r);
}

static void sample_row(LogitsRow &row, const SampleArgs &args, int64_t r) {
  load_logits(row, args.in, r);
  const float normalizer = row_sum(row);
  if (has_edits(args.edits)) edit_row(row, args.edits, r, true);
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

static void top_tokens_row(LogitsRow &row, const TopTokensArgs &args, int64_t r, Scratch &scratch) {
  load_logits(row, args.in, r);
  const float normalizer = row_sum(row);
  const bool edited = has_edits(args.edits);
  if (edited) {
    subtract(row, normalizer);
    edit_row(row, args.edits, r, false);
  }
  const float top = row_top(row);
  if (!(top > -kInfinity && top < kInfinity)) {
    for (int i = 0; i < args.count; ++i) {
      const int64_t at = r * args.count + i;
      args.token_ids[at] = i, args.scores[at] = args.logprobs[at] = -kInfinity;
    }
    return;
  }
  const float kth = kth_largest(row, args.count);
  // Of the tokens that equal the last one there may be many.
  auto *entries = scratch.take<uint64_t>(size_t(row.vocabulary));
  int found = 0;
  for (int g = 0; g < row.groups; ++g) {
    if (!(row.tops[g] >= kth)) continue;
    for (int token = g * kGroupTokens; token < (g + 1) * kGroupTokens && token < row.vocabulary; ++token)
      if (row.x[token] >= kth)
        entries[found++] = uint64_t(key_of(row.x[token])) << 32 | uint32_t(~uint32_t(token));
  }
  sort_entries(entries, found);
  for (int i = 0; i < args.count; ++i) {
    const int64_t token = ~uint32_t(entries[i]) & 0xffffffffu, at = r * args.count + i;
    args.token_ids[at] = token;
    args.logprobs[at] = raw_logit(args.in, r, token) - normalizer;
    args.scores[at] = edited ? row.x[token] : args.logprobs[at];
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

static void token_ranks(const TokenRanksArgs &args) {
#pragma omp parallel for num_threads(args.in.num_threads) schedule(dynamic) if (args.in.rows > 1)
  for (int r = 0; r < args.in.rows; ++r) {
    Scratch &scratch = thread_scratch();
    scratch.reset();
    LogitsRow row = take_row(scratch, args.in.vocabulary);
    load_logits(row, args.in, r);
    const float normalizer = row_sum(row);
    for (int64_t at = int64_t(r) * args.count; at < int64_t(r + 1) * args.count; ++at) {
      args.logprobs[at] = row.x[args.token_ids[at]] - normalizer;
      args.ranks[at] = rank_of(row, int(args.token_ids[at]));
    }
  }
}
