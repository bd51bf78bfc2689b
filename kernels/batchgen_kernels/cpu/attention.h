// Paged attention over the plan's tasks. Included once per level, inside that level's namespace.

// Results of shared nodes, handed on to their children: one row per (planned query, head).
struct SharedRows {
  float *maximum = nullptr, *sum = nullptr, *values = nullptr;
};

// The values of the keys [begin, end) of a segment, for one KV head.
template <typename Cache> struct SegmentValues {
  const Cache *cache;
  const int64_t *rows;
  int begin, end;
};

// One tile of rows meets one segment.
template <typename Cache> struct Unit {
  RowState *state = nullptr;
  int num_rows = 0;
  int tile = 0;  // of the task
  int begin = 0, end = 0;  // keys, multiples of 16
  const SegmentValues<Cache> *values = nullptr;  // to load, if this is the first unit of its segment
  LaneRange range;
  ScoreRule rule;
  Vec maximum, sum;
  float *products;
  uint16_t *rounded;
};

// The rows of a part: which query and head each is, where its result so far lies. The rows of a KV head fill tiles of
// their own, and those of all its KV heads are alike but for the head.
template <class Tile> class PartRows {
 public:
  static constexpr int L = Tile::kRows;
  using Query = typename Tile::QueryType;

  PartRows(const AttentionArgs &args, const AttentionPlan &plan, const SharedRows &shared, const PlanPart &part,
           int first_tile, Scratch &scratch)
      : part(part), node(plan.nodes[part.node]), first_tile(first_tile), args_(args),
        queries_(plan.queries.data() + part.query_begin), shared_(shared), group_(args.num_heads / args.num_kv_heads),
        width_(Tile::value_width(args.head_dim_v)), num_rows_((part.query_end - part.query_begin) * group_),
        tiles_per_head_((num_rows_ + L - 1) / L), states_(scratch.take<RowState>(size_t(num_tiles()))),
        positions_(scratch.take<int32_t>(size_t(tiles_per_head_) * L)) {
    float *values = scratch.take<float>(size_t(num_tiles()) * L * width_);
    for (int t = 0; t < num_tiles(); ++t) states_[t].values = values + size_t(t) * L * width_;
    // Lanes without a row see what the last row sees, so they never force the masked path.
    for (int row = 0; row < tiles_per_head_ * L; ++row)
      positions_[row] = queries_[std::min(row, num_rows_ - 1) / group_].position;
  }

  int num_tiles() const { return part.num_kv_heads * tiles_per_head_; }
  int tiles_per_head() const { return tiles_per_head_; }
  // Tiles are counted within the part here, and within the task from `first_tile` on in Tile.
  int rows_of(int tile) const { return std::min(L, num_rows_ - tile % tiles_per_head_ * L); }
  const int32_t *positions(int tile) const { return positions_ + tile * L; }
  RowState &state(int tile) const { return states_[tile]; }

  void begin(Tile &tile) {
    for (int t = 0; t < num_tiles(); ++t) {
      std::fill_n(states_[t].maximum, kLanes, kNothing), std::fill_n(states_[t].sum, kLanes, 0.0f);
      std::memset(states_[t].values, 0, sizeof(float) * size_t(L * width_));
    }
    const Query *rows[L];
    for_each_row([&](const Row &row) {
      rows[row.lane] = static_cast<const Query *>(args_.q) + queries_[row.query].token * args_.q_stride_t +
                       row.head * args_.q_stride_h;
      if (row.lane + 1 == rows_of(row.tile)) tile.set_queries(first_tile + row.tile, rows, row.lane + 1);
      if (!node.starts) receive(row);
    });
  }

  void end(const Tile &tile) const {
    for_each_row([&](const Row &row) { node.ends ? write(row, tile) : hand_on(row); });
  }

  const PlanPart &part;
  const PlanNode &node;
  const int first_tile;

 private:
  struct Row {
    int tile, lane, query, head;
  };

  template <typename F> void for_each_row(F visit) const {
    for (int kv_head = 0; kv_head < part.num_kv_heads; ++kv_head)
      for (int row = 0, query = 0; row < num_rows_; ++query)
        for (int member = 0; member < group_; ++member, ++row)
          visit(Row{kv_head * tiles_per_head_ + row / L, row % L, query, (part.kv_head + kv_head) * group_ + member});
  }

  size_t shared_row(const Row &row) const { return size_t(part.query_begin + row.query) * args_.num_heads + row.head; }
  float *values(const Row &row) const { return states_[row.tile].values + size_t(row.lane) * width_; }

  void receive(const Row &row) const {
    const size_t from = shared_row(row);
    RowState &state = states_[row.tile];
    for (int lane = row.lane; lane < kLanes; lane += L)
      state.maximum[lane] = shared_.maximum[from], state.sum[lane] = shared_.sum[from];
    std::memcpy(values(row), shared_.values + from * width_, sizeof(float) * size_t(width_));
  }

  void hand_on(const Row &row) const {
    const size_t to = shared_row(row);
    const RowState &state = states_[row.tile];
    shared_.maximum[to] = state.maximum[row.lane], shared_.sum[to] = state.sum[row.lane];
    std::memcpy(shared_.values + to * width_, values(row), sizeof(float) * size_t(width_));
  }

  void write(const Row &row, const Tile &tile) const {
    const RowState &state = states_[row.tile];
    const float maximum = state.maximum[row.lane], sum = state.sum[row.lane];
    float factor = 1 / sum;
    if (args_.sinks) {
      const float sink = args_.sinks[row.head], top = std::max(maximum, sink);
      float e[kLanes];
      store(e, exp(select(1, splat(maximum - top), splat(sink - top))));
      factor = e[0] / (sum * e[0] + e[1]);
    }
    Query *out = static_cast<Query *>(args_.out) +
                 (size_t(queries_[row.query].token) * args_.num_heads + row.head) * args_.head_dim_v;
    for (int d = 0; d < args_.head_dim_v; d += kLanes)
      store_as(out + d, tile.value_lanes(values(row), d) * splat(factor), std::min(kLanes, args_.head_dim_v - d));
  }

  const AttentionArgs &args_;
  const PlannedQuery *queries_;
  const SharedRows &shared_;
  const int group_, width_, num_rows_, tiles_per_head_;
  RowState *states_;
  int32_t *positions_;
};

// The parts of a run.
template <class Tile> class AttentionRun {
 public:
  static constexpr int L = Tile::kRows;
  using Cache = typename Tile::CacheType;
  using Part = PartRows<Tile>;

  AttentionRun(const AttentionArgs &args, const AttentionPlan &plan, const SharedRows &shared, const PlanRun &run,
               FetchStream<Cache> &stream, Scratch &scratch)
      : args_(args), plan_(plan), stream_(stream), num_parts_(run.part_end - run.part_begin),
        parts_(scratch.take<Part>(size_t(num_parts_))),
        num_tiles_(take_parts(shared, plan.parts.data() + run.part_begin, scratch)),
        tile_(scratch, args.head_dim_k, args.head_dim_v, args.block_size, num_tiles_),
        values_(scratch.take<float>(size_t(L) * Tile::value_width(args.head_dim_v))),
        ranges_(scratch.take<LaneRange>(size_t(num_tiles_))) {
    for (auto &unit : units_) {
      unit.products = scratch.take<float>(kSegmentTokens * Tile::kProductsPerKey);
      unit.rounded = scratch.take<uint16_t>(kSegmentTokens * L);
    }
  }

  void run() {
    for (int p = 0; p < num_parts_; ++p) parts_[p].begin(tile_);
    for (int p = 0; p < num_parts_; ++p) {
      const Part &part = parts_[p];
      const SegmentRange segments = segments_of(args_, plan_, part.part);
      for (int segment = segments.begin; segment < segments.end; ++segment) {
        stream_.begin_segment(steps_of(part));
        visit_segment(part, segment);
      }
    }
    advance();
    advance();
    for (int p = 0; p < num_parts_; ++p) parts_[p].end(tile_);
  }

 private:
  // Of Prefetcher, while a segment is computed: one beside each pair of values, and for each tile one beside each vector of
  // scores and of weights, and those of the products.
  int steps_of(const Part &part) const {
    constexpr int kVectors = kSegmentTokens * L / kLanes;
    const int per_tile = 2 * kVectors + Tile::product_steps(args_.head_dim_k, args_.head_dim_v);
    return part.part.num_kv_heads * kSegmentTokens / 2 + part.num_tiles() * per_tile;
  }

  int take_parts(const SharedRows &shared, const PlanPart *parts, Scratch &scratch) {
    int num_tiles = 0;
    for (int p = 0; p < num_parts_; ++p) {
      new (parts_ + p) Part(args_, plan_, shared, parts[p], num_tiles, scratch);
      num_tiles += parts_[p].num_tiles();
    }
    return num_tiles;
  }

  const int32_t *blocks_of(const Part &part, int segment) const {
    return part.node.block_table + segment * (kSegmentTokens / args_.block_size);
  }
  // The caches' row of the first token of a block, for the first KV head.
  int64_t row_of(int32_t block) const { return int64_t(block) * args_.num_kv_heads * args_.block_size; }
  // The rows of a KV head of a block follow those of the one before.
  const Cache *keys_of(int kv_head) const {
    return static_cast<const Cache *>(args_.k_cache) + int64_t(kv_head) * args_.block_size * args_.head_dim_k;
  }
  const Cache *values_of(int kv_head) const {
    return static_cast<const Cache *>(args_.v_cache) + int64_t(kv_head) * args_.block_size * args_.head_dim_v;
  }

  void visit_segment(const Part &part, int segment) {
    int first = kSegmentTokens, last = 0;
    for (int t = 0; t < part.tiles_per_head(); ++t) {
      ranges_[t] = visible_keys<L>(part.positions(t), segment, args_.window);
      first = std::min(first, ranges_[t].first), last = std::max(last, ranges_[t].last);
    }
    if (first >= last) return;
    rows_turn_ = 1 - rows_turn_;
    int64_t *rows = rows_[rows_turn_];
    const int32_t *block = blocks_of(part, segment);
    for (int key = 0; key < last; key += args_.block_size, ++block)
      for (int i = 0; i < args_.block_size; ++i) rows[key + i] = row_of(*block) + i;
    for (int i = 0, tile = 0; i < part.part.num_kv_heads; ++i) {
      const int kv_head = part.part.kv_head + i;
      turn_ = 1 - turn_;
      tile_.load_keys(keys_of(kv_head), rows, first, last);
      segment_values_[turn_] = {values_of(kv_head), rows, first, last};
      const ScoreRule rule = rule_of(kv_head, rows, first, last);
      const SegmentValues<Cache> *values = &segment_values_[turn_];
      for (int t = 0; t < part.tiles_per_head(); ++t, ++tile)
        if (ranges_[t].first < ranges_[t].last) add_unit(part, tile, ranges_[t], rule, values), values = nullptr;
    }
  }

  ScoreRule rule_of(int kv_head, const int64_t *rows, int first, int last) {
    ScoreRule rule{args_.scale, args_.softcap, nullptr, nullptr};
    if (!args_.k_scales) return rule;
    float *key_scale = key_scales_[turn_], *value_scale = value_scales_[turn_];
    const int64_t from = int64_t(kv_head) * args_.block_size;
    const size_t bytes = sizeof(float) * size_t(args_.block_size);
    for (int key = first / args_.block_size * args_.block_size; key < last; key += args_.block_size) {
      std::memcpy(key_scale + key, args_.k_scales + from + rows[key], bytes);
      std::memcpy(value_scale + key, args_.v_scales + from + rows[key], bytes);
    }
    clear_outside(key_scale, first, last), clear_outside(value_scale, first, last);
    rule.key_scale = key_scale, rule.value_scale = value_scale;
    return rule;
  }

  // What lies beside the keys may be anything, and 0 times a scale must be 0.
  static void clear_outside(float *scale, int first, int last) {
    std::fill_n(scale, first, 0.0f), std::fill_n(scale + last, kSegmentTokens - last, 0.0f);
  }

  // Takes the two units before one step on, and starts a new one. The steps of a unit need each other's results, which are
  // slow to come back from memory, so steps of other units lie between them: the weighted values of the last but one, the
  // weights of the last, the products of this. One segment's values are held unpacked at a time, in the first cache.
  void add_unit(const Part &part, int tile, const LaneRange &range, const ScoreRule &rule,
                const SegmentValues<Cache> *values) {
    advance();
    auto &unit = units_[count_ % 2];
    unit.state = &part.state(tile), unit.num_rows = part.rows_of(tile), unit.tile = part.first_tile + tile;
    unit.range = range, unit.rule = rule, unit.values = values;
    unit.begin = range.first / kLanes * kLanes, unit.end = (range.last + kLanes - 1) / kLanes * kLanes;
    tile_.multiply_keys(unit.tile, unit.begin, unit.end, unit.products, stream_.ahead);
  }

  void advance() {
    ++count_;
    auto &last = units_[(count_ + 1) % 2], &before = units_[count_ % 2];
    Prefetcher &ahead = stream_.ahead;
    if (before.state)
      tile_.weigh_values(before.products, before.rounded, before.num_rows, before.begin, before.end, values_, ahead);
    if (last.state) {
      if (const auto *values = last.values)
        tile_.load_values(values->cache, values->rows, values->begin, values->end, ahead);
      weigh_keys<L>(tile_.products(last.tile, last.products), last.products, last.begin, last.end, last.range, last.rule,
                    ahead, last.maximum, last.sum);
      tile_.round_weights(last.products, last.begin, last.end, last.rounded);
    }
    if (before.state)
      merge_segment(*before.state, values_, before.num_rows, Tile::value_width(args_.head_dim_v), before.maximum,
                    before.sum);
    before.state = nullptr;
  }

  const AttentionArgs &args_;
  const AttentionPlan &plan_;
  FetchStream<Cache> &stream_;
  const int num_parts_;
  Part *parts_;
  const int num_tiles_;
  Tile tile_;
  float *values_;
  LaneRange *ranges_;
  Unit<Cache> units_[2];
  SegmentValues<Cache> segment_values_[2];
  int64_t rows_[2][kSegmentTokens];  // of the caches, for the keys of two segments
  int count_ = 0, turn_ = 0, rows_turn_ = 0;
  float key_scales_[2][kSegmentTokens], value_scales_[2][kSegmentTokens];
};

// Computes a thread's tasks.
template <class Wide, class Narrow> class TaskRunner {
 public:
  using Stream = FetchStream<typename Wide::CacheType>;

  TaskRunner(const AttentionArgs &args, const AttentionPlan &plan, const SharedRows &shared, Stream &stream)
      : args_(args), plan_(plan), shared_(shared), stream_(stream), scratch_(thread_scratch()) {}

  void run(const PlanTask &task) {
    for (int run = task.run_begin; run < task.run_end; ++run) {
      const PlanPart &first = plan_.parts[plan_.runs[run].part_begin];
      const int rows = (first.query_end - first.query_begin) * (args_.num_heads / args_.num_kv_heads);
      rows <= Narrow::kRows ? compute<Narrow>(plan_.runs[run]) : compute<Wide>(plan_.runs[run]);
    }
  }

 private:
  template <class Tile> void compute(const PlanRun &run) {
    if (tile_rows_ != Tile::kRows) Tile::begin_tasks();
    tile_rows_ = Tile::kRows;
    scratch_.reset();
    AttentionRun<Tile>(args_, plan_, shared_, run, stream_, scratch_).run();
  }

  const AttentionArgs &args_;
  const AttentionPlan &plan_;
  const SharedRows &shared_;
  Stream &stream_;
  Scratch &scratch_;
  int tile_rows_ = 0;  // that this thread is set up for
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
  for (const auto &phase : plan.phases) {
    TaskQueue queue(phase, args.num_threads);
#pragma omp parallel for num_threads(args.num_threads) schedule(static, 1)
    for (int thread = 0; thread < args.num_threads; ++thread) {
      FetchStream<typename Wide::CacheType> stream(args, plan, queue, thread);
      TaskRunner<Wide, Narrow> runner(args, plan, shared, stream);
      while (const PlanTask *task = stream.next_task()) runner.run(*task);
      end_tiles();
    }
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
