// Counter-based random numbers and the draw of a token; philox.py and sample.py have the formulas. Included once per
// level, inside that level's namespace.

struct Words {
  uint32_t w[4];
};

static inline Words philox(uint32_t key_0, uint32_t key_1, Words counter) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t(counter.w[0]) * 0xD2511F53u, second = uint64_t(counter.w[2]) * 0xCD9E8D57u;
    counter = {{uint32_t(second >> 32) ^ counter.w[1] ^ key_0, uint32_t(second),
                uint32_t(first >> 32) ^ counter.w[3] ^ key_1, uint32_t(first)}};
    key_0 += 0x9E3779B9u, key_1 += 0xBB67AE85u;
  }
  return counter;
}

// The noise of one row and position.
struct Noise {
  Words identity;
  uint32_t position;

  Noise(const int64_t *key, int64_t num_later)
      : identity(philox(uint32_t(key[0]), uint32_t(uint64_t(key[0]) >> 32),
                        {{uint32_t(key[2]), uint32_t(uint64_t(key[2]) >> 32), uint32_t(key[1]), uint32_t(key[3])}})),
        position(uint32_t(key[4] + num_later)) {}

  Words four(uint32_t first_draw) const {
    return philox(identity.w[0], identity.w[1], {{first_draw >> 2, position, identity.w[2], identity.w[3]}});
  }
};

static inline float gumbel(uint32_t bits) {
  const float u0 = (float(bits) + 0.5f) * 2.3283064365386963e-10f;
  const float u = u0 < 0.999999940395355224609375f ? u0 : 0.999999940395355224609375f;
  const float series = u * (1.0f + u * (0.5f + u * (0.3333333333333333f + u * 0.25f)));
  return -__builtin_logf(u < 0.015625f ? series : -__builtin_logf(1.0f - u));
}

// Index of the largest score + noise, the first where equal; scores of -inf are passed over.
static int draw_index(const float *scores, int count, uint32_t first_draw, const Noise &noise) {
  int best = 0;
  float best_score = -kInfinity;
  for (int i = 0; i < count; i += 4) {
    const int end = count - i < 4 ? count - i : 4;
    bool any = false;
    for (int j = 0; j < end; ++j) any |= scores[i + j] > -kInfinity;
    if (!any) continue;
    const Words words = noise.four(first_draw + uint32_t(i));
    for (int j = 0; j < end; ++j) {
      const float score = scores[i + j] + gumbel(words.w[j]);
      if (score > best_score) best = i + j, best_score = score;
    }
  }
  return best;
}

// The scores of a group; those that the cut drops become -inf.
static inline void drop_from_group(const LogitsRow &row, int group, const Cut &cut, Vec *v) {
  get_group(row, group, v);
  for (int i = 0; i < kGroupVectors; ++i)
    v[i] = select(kept_lanes(v[i], group * kGroupTokens + i * kLanes, cut), v[i], splat(-kInfinity));
}

// Sums of the groups, of the tokens that are kept alone.
static void drop_from_sums(LogitsRow &row, const Cut &cut) {
  Vec v[kGroupVectors];
  for (int g = 0; g < row.groups; ++g) {
    if (!(row.tops[g] >= cut.lowest)) {
      row.sums[g] = -kInfinity;
      continue;
    }
    drop_from_group(row, g, cut, v);
    Vec largest = v[0];
    for (int i = 1; i < kGroupVectors; ++i) largest = max(largest, v[i]);
    row.sums[g] = log_sum_exp(v, kGroupVectors, reduce_max(largest));
  }
}

// A token from softmax(row.x) under the cut: first its group, then itself.
static int draw_token(LogitsRow &row, const Cut *cut, const Noise &noise) {
  const int group = draw_index(row.sums, row.groups, 0x80000000u, noise);
  Vec v[kGroupVectors];
  if (cut) drop_from_group(row, group, *cut, v);
  else get_group(row, group, v);
  float scores[kGroupTokens];
  for (int i = 0; i < kGroupVectors; ++i) store(scores + i * kLanes, v[i]);
  return group * kGroupTokens + draw_index(scores, kGroupTokens, uint32_t(group) * kGroupTokens, noise);
}
