// Paged attention over the plan's tasks. Included once per level, inside that level's namespace.

// Results of shared nodes, handed on to their children: one row per (planned query, head).
struct SharedRows {
  float *maximum = nullptr, *sum = nullptr, *values = nullptr;
};

template <class Tile> class AttentionTask {
 public:
  using Query = typename Tile::QueryType;
  using Cache = typename Tile::CacheType;

  AttentionTask(const AttentionArgs &args, const AttentionPlan &plan, const SharedRows &shared, const PlanTask &task,
                Scratch &scratch)
      : args_(args), plan_(plan), shared_(shared), node_(plan.nodes[task.node]), task_(task),
        group_(args.num_heads / args.num_kv_heads), num_rows_((task.query_end - task.query_begin) * group_),
        num_tiles_((num_rows_ + kLanes - 1) / kLanes), width_(Tile::value_width(args.head_dim_v)),
        tile_(scratch, args.head_dim_k, args.head_dim_v, args.block_size, num_tiles_),
        products_(scratch.take<float>(kSegmentTokens * kLanes)),
        segment_values_(scratch.take<float>(size_t(kLanes) * width_)), states_(scratch.take<RowState>(num_tiles_)),
        ranges_(scratch.take<LaneRange>(num_tiles_)), positions_(scratch.take<int32_t>(size_t(num_tiles_) * kLanes)) {
    float *values = scratch.take<float>(size_t(num_tiles_) * kLanes * width_);
    for (int t = 0; t < num_tiles_; ++t) states_[t].values = values + size_t(t) * kLanes * width_;
  }

  void run() {
    for (int row = 0; row < num_tiles_ * kLanes; ++row) begin_row(row);
    const int last = std::min(node_.segment_end, position_of(num_rows_ - 1) / kSegmentTokens + 1);
    for (int segment = first_segment(); segment < last; ++segment) {
      if (segment + 1 < last) prefetch(segment + 1);
      visit_segment(segment);
    }
    for (int row = 0; row < num_rows_; ++row) end_row(row);
  }

 private:
  const PlannedQuery &query_of(int row) const { return plan_.queries[task_.query_begin + row / group_]; }
  int position_of(int row) const { return query_of(row).position; }
  int head_of(int row) const { return task_.kv_head * group_ + row % group_; }
  size_t shared_row(int row) const {
    return size_t(task_.query_begin + row / group_) * args_.num_heads + head_of(row);
  }

  // The first segment that some row's window reaches; earlier ones may lie in blocks that were given back.
  int first_segment() const {
    if (!args_.window) return node_.segment_begin;
    int first_key = INT32_MAX;
    for (int row = 0; row < num_rows_; row += group_)
      first_key = std::min(first_key, std::max(0, position_of(row) - args_.window + 1));
    return std::max(node_.segment_begin, first_key / kSegmentTokens);
  }

  void begin_row(int row) {
    RowState &state = states_[row / kLanes];
    const int lane = row % kLanes;
    float *values = state.values + lane * width_;
    // Lanes without a row see what the last row sees, so they never force the masked path.
    positions_[row] = position_of(std::min(row, num_rows_ - 1));
    if (row < num_rows_) {
      const Query *q = static_cast<const Query *>(args_.q) + query_of(row).token * args_.q_stride_t;
      tile_.set_query(row / kLanes, lane, q + head_of(row) * args_.q_stride_h);
      if (!node_.starts) {
        const size_t from = shared_row(row);
        state.maximum[lane] = shared_.maximum[from], state.sum[lane] = shared_.sum[from];
        std::memcpy(values, shared_.values + from * width_, sizeof(float) * width_);
        return;
      }
    }
    state.maximum[lane] = kNothing, state.sum[lane] = 0;
    std::memset(values, 0, sizeof(float) * width_);
  }

  void end_row(int row) {
    const RowState &state = states_[row / kLanes];
    const int lane = row % kLanes;
    const float *values = state.values + lane * width_;
    if (!node_.ends) {
      const size_t to = shared_row(row);
      shared_.maximum[to] = state.maximum[lane], shared_.sum[to] = state.sum[lane];
      std::memcpy(shared_.values + to * width_, values, sizeof(float) * width_);
      return;
    }
    float factor = 1 / state.sum[lane];
    if (args_.sinks) {
      const float sink = args_.sinks[head_of(row)], top = std::max(state.maximum[lane], sink);
      float e[kLanes];
      store(e, exp(select(1, splat(state.maximum[lane] - top), splat(sink - top))));
      factor = e[0] / (state.sum[lane] * e[0] + e[1]);
    }
    Query *out = static_cast<Query *>(args_.out) +
                 (size_t(query_of(row).token) * args_.num_heads + head_of(row)) * args_.head_dim_v;
    for (int d = 0; d < args_.head_dim_v; d += kLanes)
      store_as(out + d, tile_.value_lanes(values, d) * splat(factor), std::min(kLanes, args_.head_dim_v - d));
  }

  int64_t cache_row(int segment, int key) const {
    const int token = segment * kSegmentTokens + key;
    const int64_t block = node_.block_table[token / args_.block_size];
    return (block * args_.num_kv_heads + task_.kv_head) * args_.block_size + token % args_.block_size;
  }

  void visit_segment(int segment) {
    int first = kSegmentTokens, last = 0;
    for (int t = 0; t < num_tiles_; ++t) {
      ranges_[t] = visible_keys(positions_ + t * kLanes, segment, args_.window);
      first = std::min(first, ranges_[t].first), last = std::max(last, ranges_[t].last);
    }
    if (first >= last) return;
    int64_t rows[kSegmentTokens];
    for (int key = first; key < last; ++key) rows[key] = cache_row(segment, key);
    tile_.load_segment(static_cast<const Cache *>(args_.k_cache), static_cast<const Cache *>(args_.v_cache), rows,
                       first, last);
    float key_scale[kSegmentTokens], value_scale[kSegmentTokens];
    ScoreRule rule{args_.scale, args_.softcap, nullptr, nullptr};
    if (args_.k_scales) {
      std::fill_n(key_scale, kSegmentTokens, 0.0f), std::fill_n(value_scale, kSegmentTokens, 0.0f);
      for (int key = first; key < last; ++key)
        key_scale[key] = args_.k_scales[rows[key]], value_scale[key] = args_.v_scales[rows[key]];
      rule.key_scale = key_scale, rule.value_scale = value_scale;
    }
    for (int t = 0; t < num_tiles_; ++t) add_segment(t, ranges_[t], rule);
  }

  void add_segment(int tile, const LaneRange &range, const ScoreRule &rule) {
    if (range.first >= range.last) return;
    const int begin = range.first / kLanes * kLanes, end = (range.last + kLanes - 1) / kLanes * kLanes;
    const int rows = std::min(kLanes, num_rows_ - tile * kLanes);
    Vec maximum, sum;
    tile_.multiply_keys(tile, rows, begin, end, products_);
    weigh_keys(products_, begin, end, range, rule, maximum, sum);
    tile_.weigh_values(products_, rows, begin, end, segment_values_);
    merge_segment(states_[tile], segment_values_, rows, width_, maximum, sum);
  }

  void prefetch(int segment) const {
    const int first_token = segment * kSegmentTokens;
    const int tokens = std::min(kSegmentTokens, position_of(num_rows_ - 1) + 1 - first_token);
    for (int token = 0; token < tokens; token += args_.block_size) {
      const int64_t row = cache_row(segment, token);
      const int count = std::min(args_.block_size, tokens - token);
      prefetch_range(static_cast<const Cache *>(args_.k_cache) + row * args_.head_dim_k, count * args_.head_dim_k);
      prefetch_range(static_cast<const Cache *>(args_.v_cache) + row * args_.head_dim_v, count * args_.head_dim_v);
    }
  }
  static void prefetch_range(const Cache *from, int count) {
    const char *at = reinterpret_cast<const char *>(from), *end = reinterpret_cast<const char *>(from + count);
    for (; at < end; at += 64) __builtin_prefetch(at, 0, 2);
  }

  const AttentionArgs &args_;
  const AttentionPlan &plan_;
  const SharedRows &shared_;
  const PlanNode &node_;
  const PlanTask &task_;
  const int group_, num_rows_, num_tiles_, width_;
  Tile tile_;
  float *products_, *segment_values_;
  RowState *states_;
  LaneRange *ranges_;
  int32_t *positions_;
};

template <class Tile> static void run_attention(const AttentionArgs &args, const AttentionPlan &plan) {
  SharedRows shared;
  if (plan.has_shared_nodes) {
    const size_t rows = plan.queries.size() * size_t(args.num_heads);
    shared_scratch().reset();
    shared.values = shared_scratch().take<float>(rows * size_t(Tile::value_width(args.head_dim_v) + 2));
    shared.maximum = shared.values + rows * size_t(Tile::value_width(args.head_dim_v));
    shared.sum = shared.maximum + rows;
  }
#pragma omp parallel num_threads(args.num_threads)
  {
    begin_tiles();
    Scratch &scratch = thread_scratch();
    for (const auto &phase : plan.phases) {
#pragma omp for schedule(dynamic, 1)
      for (size_t i = 0; i < phase.size(); ++i) {
        scratch.reset();
        AttentionTask<Tile>(args, plan, shared, phase[i], scratch).run();
      }
    }
    end_tiles();
  }
}

static void attention(const AttentionArgs &args, const AttentionPlan &plan) {
#if BG_LEVEL >= 3
  if (args.dtype == kBFloat16 && args.kv_dtype == kBFloat16) return run_attention<PairTile<uint16_t>>(args, plan);
  if (args.dtype == kBFloat16) return run_attention<PairTile<int8_t>>(args, plan);
#else
  if (args.dtype == kBFloat16 && args.kv_dtype == kBFloat16)
    return run_attention<FloatTile<uint16_t, uint16_t>>(args, plan);
  if (args.dtype == kBFloat16) return run_attention<FloatTile<uint16_t, int8_t>>(args, plan);
#endif
  if (args.kv_dtype == kFloat32) return run_attention<FloatTile<float, float>>(args, plan);
  run_attention<FloatTile<float, int8_t>>(args, plan);
}
