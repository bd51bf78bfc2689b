// Paged attention over the plan's tasks. Included once per level, inside that level's namespace.

// Results of shared nodes, handed on to their children: one row per (planned query, head).
struct SharedRows {
  float *maximum = nullptr, *sum = nullptr, *values = nullptr;
};

// One tile of rows meets one segment.
struct Unit {
  int tile = -1, turn = 0;  // turn: which loaded segment
  int begin = 0, end = 0;   // keys, multiples of 16
  LaneRange range;
  ScoreRule rule;
  Vec maximum, sum;
  float *products;
  uint16_t *rounded;
};

// The rows of a task: which query and head each is, where its result so far lies.
template <class Tile> class TaskRows {
 public:
  static constexpr int L = Tile::kRows;
  using Query = typename Tile::QueryType;

  TaskRows(const AttentionArgs &args, const AttentionPlan &plan, const SharedRows &shared, const PlanTask &task,
           Scratch &scratch)
      : args_(args), queries_(plan.queries.data() + task.query_begin), shared_(shared), node_(plan.nodes[task.node]),
        task_(task), group_(args.num_heads / args.num_kv_heads), width_(Tile::value_width(args.head_dim_v)),
        num_rows_((task.query_end - task.query_begin) * group_), num_tiles_((num_rows_ + L - 1) / L),
        states_(scratch.take<RowState>(size_t(num_tiles_))),
        positions_(scratch.take<int32_t>(size_t(num_tiles_) * L)) {
    float *values = scratch.take<float>(size_t(num_tiles_) * L * width_);
    for (int t = 0; t < num_tiles_; ++t) states_[t].values = values + size_t(t) * L * width_;
  }

  int num_tiles() const { return num_tiles_; }
  int rows_of(int tile) const { return std::min(L, num_rows_ - tile * L); }
  int last_position() const { return positions_[num_rows_ - 1]; }
  const int32_t *positions(int tile) const { return positions_ + tile * L; }
  RowState &state(int tile) { return states_[tile]; }

  int first_position() const {
    int first = INT32_MAX;
    for (int row = 0; row < num_rows_; ++row) first = std::min(first, positions_[row]);
    return first;
  }

  void begin(Tile &tile) {
    for (int t = 0; t < num_tiles_; ++t) {
      std::fill_n(states_[t].maximum, kLanes, kNothing), std::fill_n(states_[t].sum, kLanes, 0.0f);
      std::memset(states_[t].values, 0, sizeof(float) * size_t(L * width_));
    }
    for (int row = 0, query = 0, head = 0; row < num_tiles_ * L; ++row) {
      // Lanes without a row see what the last row sees, so they never force the masked path.
      positions_[row] = row < num_rows_ ? queries_[query].position : positions_[num_rows_ - 1];
      if (row >= num_rows_) continue;
      const Query *q = static_cast<const Query *>(args_.q) + queries_[query].token * args_.q_stride_t;
      tile.set_query(row / L, row % L, q + (task_.kv_head * group_ + head) * args_.q_stride_h);
      if (!node_.starts) receive(row, shared_row(query, head));
      if (++head == group_) head = 0, ++query;
    }
  }

  void end(const Tile &tile) {
    for (int row = 0, query = 0, head = 0; row < num_rows_; ++row) {
      node_.ends ? write(row, query, head, tile) : hand_on(row, shared_row(query, head));
      if (++head == group_) head = 0, ++query;
    }
  }

 private:
  size_t shared_row(int query, int head) const {
    return size_t(task_.query_begin + query) * args_.num_heads + task_.kv_head * group_ + head;
  }
  float *values(int row) { return states_[row / L].values + size_t(row % L) * width_; }

  void receive(int row, size_t from) {
    RowState &state = states_[row / L];
    for (int lane = row % L; lane < kLanes; lane += L)
      state.maximum[lane] = shared_.maximum[from], state.sum[lane] = shared_.sum[from];
    std::memcpy(values(row), shared_.values + from * width_, sizeof(float) * size_t(width_));
  }

  void hand_on(int row, size_t to) {
    const RowState &state = states_[row / L];
    shared_.maximum[to] = state.maximum[row % L], shared_.sum[to] = state.sum[row % L];
    std::memcpy(shared_.values + to * width_, values(row), sizeof(float) * size_t(width_));
  }

  void write(int row, int query, int head, const Tile &tile) {
    const RowState &state = states_[row / L];
    const float maximum = state.maximum[row % L], sum = state.sum[row % L];
    const int head_index = task_.kv_head * group_ + head;
    float factor = 1 / sum;
    if (args_.sinks) {
      const float sink = args_.sinks[head_index], top = std::max(maximum, sink);
      float e[kLanes];
      store(e, exp(select(1, splat(maximum - top), splat(sink - top))));
      factor = e[0] / (sum * e[0] + e[1]);
    }
    Query *out = static_cast<Query *>(args_.out) +
                 (size_t(queries_[query].token) * args_.num_heads + head_index) * args_.head_dim_v;
    for (int d = 0; d < args_.head_dim_v; d += kLanes)
      store_as(out + d, tile.value_lanes(values(row), d) * splat(factor), std::min(kLanes, args_.head_dim_v - d));
  }

  const AttentionArgs &args_;
  const PlannedQuery *queries_;
  const SharedRows &shared_;
  const PlanNode &node_;
  const PlanTask &task_;
  const int group_, width_, num_rows_, num_tiles_;
  RowState *states_;
  int32_t *positions_;
};

template <class Tile> class AttentionTask {
 public:
  static constexpr int L = Tile::kRows;
  using Cache = typename Tile::CacheType;

  AttentionTask(const AttentionArgs &args, const AttentionPlan &plan, const SharedRows &shared, const PlanTask &task,
                Scratch &scratch)
      : args_(args), node_(plan.nodes[task.node]), kv_head_(task.kv_head), rows_(args, plan, shared, task, scratch),
        tile_(scratch, args.head_dim_k, args.head_dim_v, args.block_size, rows_.num_tiles()),
        values_(scratch.take<float>(size_t(L) * Tile::value_width(args.head_dim_v))),
        ranges_(scratch.take<LaneRange>(size_t(rows_.num_tiles()))) {
    for (Unit &unit : units_) {
      unit.products = scratch.take<float>(kSegmentTokens * L);
      unit.rounded = scratch.take<uint16_t>(kSegmentTokens * L);
    }
  }

  void run() {
    Tile::begin_task();
    rows_.begin(tile_);
    last_segment_ = std::min(node_.segment_end, rows_.last_position() / kSegmentTokens + 1);
    int segment = node_.segment_begin;
    // Segments before every row's window may lie in blocks that were given back.
    if (args_.window) segment = std::max(segment, (rows_.first_position() + 1 - args_.window) / kSegmentTokens);
    for (; segment < last_segment_; ++segment) visit_segment(segment);
    advance();
    advance();
    rows_.end(tile_);
  }

 private:
  int64_t cache_row(int segment, int key) const {
    const int token = segment * kSegmentTokens + key;
    const int64_t block = node_.block_table[token / args_.block_size];
    return (block * args_.num_kv_heads + kv_head_) * args_.block_size + token % args_.block_size;
  }

  void visit_segment(int segment) {
    int first = kSegmentTokens, last = 0;
    for (int t = 0; t < rows_.num_tiles(); ++t) {
      ranges_[t] = visible_keys<L>(rows_.positions(t), segment, args_.window);
      first = std::min(first, ranges_[t].first), last = std::max(last, ranges_[t].last);
    }
    if (first >= last) return;
    int64_t rows[kSegmentTokens];
    for (int key = first; key < last; ++key) rows[key] = cache_row(segment, key);
    if (segment + 1 < last_segment_) prefetch(segment + 1);
    turn_ = (turn_ + 1) % kSegmentsInFlight;
    tile_.load_segment(turn_, static_cast<const Cache *>(args_.k_cache), static_cast<const Cache *>(args_.v_cache), rows,
                       first, last, ahead_);
    const ScoreRule rule = rule_of(rows, first, last);
    for (int t = 0; t < rows_.num_tiles(); ++t)
      if (ranges_[t].first < ranges_[t].last) add_unit(t, rule);
  }

  ScoreRule rule_of(const int64_t *rows, int first, int last) {
    ScoreRule rule{args_.scale, args_.softcap, nullptr, nullptr};
    if (!args_.k_scales) return rule;
    float *key_scale = key_scales_[turn_], *value_scale = value_scales_[turn_];
    std::fill_n(key_scale, kSegmentTokens, 0.0f), std::fill_n(value_scale, kSegmentTokens, 0.0f);
    for (int key = first; key < last; ++key)
      key_scale[key] = args_.k_scales[rows[key]], value_scale[key] = args_.v_scales[rows[key]];
    rule.key_scale = key_scale, rule.value_scale = value_scale;
    return rule;
  }

  // Starts a unit, and takes the two before it one step on. The steps of a unit need each other's results at once, so
  // each is followed by another unit's: products of this, weighted values of the last but one, weights of the last.
  void add_unit(int tile, const ScoreRule &rule) {
    Unit &unit = units_[count_ % kUnits];
    unit.tile = tile, unit.turn = turn_, unit.range = ranges_[tile], unit.rule = rule;
    unit.begin = unit.range.first / kLanes * kLanes, unit.end = (unit.range.last + kLanes - 1) / kLanes * kLanes;
    tile_.multiply_keys(unit.turn, tile, unit.begin, unit.end, unit.products);
    advance();
  }

  void advance() {
    Unit &last = units_[(count_ + kUnits - 1) % kUnits], &before = units_[(count_ + kUnits - 2) % kUnits];
    if (before.tile >= 0)
      tile_.weigh_values(before.turn, before.products, before.rounded, rows_.rows_of(before.tile), before.begin,
                         before.end, values_);
    if (last.tile >= 0) {
      weigh_keys<L>(last.products, last.begin, last.end, last.range, last.rule, ahead_, last.maximum, last.sum);
      tile_.round_weights(last.products, last.begin, last.end, last.rounded);
    }
    if (before.tile >= 0)
      merge_segment(rows_.state(before.tile), values_, rows_.rows_of(before.tile), Tile::value_width(args_.head_dim_v),
                    before.maximum, before.sum);
    before.tile = -1;
    ++count_;
  }

  void prefetch(int segment) {
    const int first_token = segment * kSegmentTokens;
    const int tokens = std::min(kSegmentTokens, rows_.last_position() + 1 - first_token);
    ahead_.clear();
    for (int token = 0; token < tokens; token += args_.block_size) {
      const int64_t row = cache_row(segment, token);
      const size_t bytes = sizeof(Cache) * size_t(std::min(args_.block_size, tokens - token));
      ahead_.add(static_cast<const Cache *>(args_.k_cache) + row * args_.head_dim_k, bytes * size_t(args_.head_dim_k));
      ahead_.add(static_cast<const Cache *>(args_.v_cache) + row * args_.head_dim_v, bytes * size_t(args_.head_dim_v));
    }
  }

  const AttentionArgs &args_;
  const PlanNode &node_;
  const int kv_head_;
  TaskRows<Tile> rows_;
  Tile tile_;
  float *values_;
  LaneRange *ranges_;
  Prefetcher ahead_;
  static constexpr int kUnits = 3;
  Unit units_[kUnits];
  int count_ = 0, turn_ = 0, last_segment_ = 0;
  float key_scales_[kSegmentsInFlight][kSegmentTokens], value_scales_[kSegmentsInFlight][kSegmentTokens];
};

template <class Wide, class Narrow> static void run_attention(const AttentionArgs &args, const AttentionPlan &plan) {
  SharedRows shared;
  if (plan.has_shared_nodes) {
    const size_t rows = plan.queries.size() * size_t(args.num_heads);
    shared_scratch().reset();
    shared.values = shared_scratch().take<float>(rows * size_t(Wide::value_width(args.head_dim_v) + 2));
    shared.maximum = shared.values + rows * size_t(Wide::value_width(args.head_dim_v));
    shared.sum = shared.maximum + rows;
  }
  const int group = args.num_heads / args.num_kv_heads;
#pragma omp parallel num_threads(args.num_threads)
  {
    Scratch &scratch = thread_scratch();
    for (const auto &phase : plan.phases) {
#pragma omp for schedule(dynamic, 1)
      for (size_t i = 0; i < phase.size(); ++i) {
        scratch.reset();
        if ((phase[i].query_end - phase[i].query_begin) * group <= Narrow::kRows)
          AttentionTask<Narrow>(args, plan, shared, phase[i], scratch).run();
        else
          AttentionTask<Wide>(args, plan, shared, phase[i], scratch).run();
      }
    }
    end_tiles();
  }
}

template <typename Query, typename Cache>
static void run_float_attention(const AttentionArgs &args, const AttentionPlan &plan) {
  run_attention<FloatTile<Query, Cache, kLanes>, FloatTile<Query, Cache, 4>>(args, plan);
}
#if BG_LEVEL >= 3
template <typename Cache> static void run_pair_attention(const AttentionArgs &args, const AttentionPlan &plan) {
  run_attention<PairTile<Cache, kLanes>, PairTile<Cache, 4>>(args, plan);
}
#else
template <typename Cache> static void run_pair_attention(const AttentionArgs &args, const AttentionPlan &plan) {
  run_float_attention<uint16_t, Cache>(args, plan);
}
#endif

static void attention(const AttentionArgs &args, const AttentionPlan &plan) {
  if (args.dtype == kBFloat16)
    args.kv_dtype == kInt8 ? run_pair_attention<int8_t>(args, plan) : run_pair_attention<uint16_t>(args, plan);
  else
    args.kv_dtype == kInt8 ? run_float_attention<float, int8_t>(args, plan) : run_float_attention<float, float>(args, plan);
}
