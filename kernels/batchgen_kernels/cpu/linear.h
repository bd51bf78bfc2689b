// out[M, N] = x[M, K] weight[N, K]^T + bias in bf16 with fp32 sums. Each output is one sum over K from first to last,
// whatever the rows beside it and the threads. Included once per level, inside that level's namespace.

// Rows that meet a panel of weights at a time; their sums are [kLinearRows, kPanelColumns].
constexpr int kLinearRows = 32;
constexpr int kBlockWeights = kBlockDepth * kPanelColumns;
// What stays in the second cache while all panels pass by, in inputs; and in the first, in bytes.
constexpr int64_t kCachedInputs = int64_t(448) << 10;
constexpr int64_t kFirstCacheBytes = int64_t(40) << 10;
// Results too large to be found in the second cache again are written past it.
constexpr int64_t kStreamedBytes = int64_t(4) << 20;

struct LinearRows {
  const uint16_t *x;  // zero-padded to whole blocks of K, and at level 4 to whole tiles of rows
  int64_t stride;
  int count;
};

// What is fetched into the second cache meanwhile: the next panel, shared out over the blocks of this one.
struct Ahead {
  const char *at;
  int lines_per_block;
  void step() {
    for (int i = 0; i < lines_per_block; ++i, at += 64) __builtin_prefetch(at, 0, 2);
  }
};

#if BG_LEVEL >= 4

constexpr int kRowStep = 16;

template <int T, bool stream> static inline void load_operand(const void *from, size_t stride_bytes) {
  stream ? tile_stream<T>(from, stride_bytes) : tile_load<T>(from, stride_bytes);
}

// Rows 0 to 15, and 16 to 31 where `second`, times one panel; the operand that meets no other soon is streamed.
template <bool second, bool stream_weights>
static inline void multiply_panel(const LinearRows &rows, const uint16_t *panel, int num_blocks, Ahead ahead, float *sums) {
  const size_t stride = size_t(rows.stride) * sizeof(uint16_t);
  const uint16_t *top = rows.x, *bottom = rows.x + 16 * rows.stride;
  tile_zero<0>(), tile_zero<1>();
  if (second) tile_zero<2>(), tile_zero<3>();
  for (int block = 0; block < num_blocks; ++block) {
    ahead.step();
    load_operand<6, stream_weights>(panel, 64);
    load_operand<4, !stream_weights>(top, stride);
    load_operand<7, stream_weights>(panel + kBlockWeights / 2, 64);
    tile_dot_bf16<0, 4, 6>();
    if (second) load_operand<5, !stream_weights>(bottom, stride);
    tile_dot_bf16<1, 4, 7>();
    if (second) tile_dot_bf16<2, 5, 6>(), tile_dot_bf16<3, 5, 7>();
    panel += kBlockWeights, top += kBlockDepth, bottom += kBlockDepth;
  }
  tile_store<0>(sums, 128), tile_store<1>(sums + 16, 128);
  if (second) tile_store<2>(sums + 16 * 32, 128), tile_store<3>(sums + 16 * 32 + 16, 128);
}

template <bool stream_weights>
static inline void multiply_rows(const LinearRows &rows, const uint16_t *panel, int num_blocks, Ahead ahead, float *sums) {
  rows.count > 16 ? multiply_panel<true, stream_weights>(rows, panel, num_blocks, ahead, sums)
                  : multiply_panel<false, stream_weights>(rows, panel, num_blocks, ahead, sums);
}

#else

constexpr int kRowStep = 1;

template <int R>
static inline void multiply_some(const LinearRows &rows, int row, const uint16_t *panel, int num_blocks, float *sums) {
  const uint16_t *x = rows.x + row * rows.stride;
  Vec sum[R][2];
  for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = zero();
  for (int block = 0; block < num_blocks; ++block, panel += kBlockWeights, x += kBlockDepth)
    for (int pair = 0; pair < kBlockDepth / 2; ++pair) {
      const WeightPairs left = load_pairs(panel + pair * 32), right = load_pairs(panel + kBlockWeights / 2 + pair * 32);
      for (int r = 0; r < R; ++r) {
        const InputPair input = splat_input(x + r * rows.stride + 2 * pair);
        sum[r][0] = add_pair(sum[r][0], input, left);
        sum[r][1] = add_pair(sum[r][1], input, right);
      }
    }
  for (int r = 0; r < R; ++r)
    store(sums + (row + r) * kPanelColumns, sum[r][0]), store(sums + (row + r) * kPanelColumns + kLanes, sum[r][1]);
}

template <bool>
static inline void multiply_rows(const LinearRows &rows, const uint16_t *panel, int num_blocks, Ahead, float *sums) {
  constexpr int kMost = BG_LEVEL >= 3 ? 12 : BG_LEVEL >= 2 ? 8 : 2;
  int row = 0;
  for (; row + kMost <= rows.count; row += kMost) multiply_some<kMost>(rows, row, panel, num_blocks, sums);
  for (; row + 4 <= rows.count && kMost > 4; row += 4) multiply_some<4>(rows, row, panel, num_blocks, sums);
  for (; row < rows.count; ++row) multiply_some<1>(rows, row, panel, num_blocks, sums);
}

#endif

// Bias and rounding for some rows of one panel.
struct LinearResult {
  int row, num_rows, column;
  bool stream;

  void write(const LinearArgs &args, const float *sums) const {
    const int columns = std::min(kPanelColumns, args.n - column);
    for (int r = 0; r < num_rows; ++r) {
      const size_t at = size_t(row + r) * args.n + column;
      if (args.out_dtype == kFloat32)
        write_row(args, sums + r * kPanelColumns, static_cast<float *>(args.out) + at, columns);
      else if (columns == kPanelColumns && !args.bias)
        store_bf16_32(static_cast<uint16_t *>(args.out) + at, load(sums + r * kPanelColumns),
                      load(sums + r * kPanelColumns + kLanes), stream);
      else
        write_row(args, sums + r * kPanelColumns, static_cast<uint16_t *>(args.out) + at, columns);
    }
  }

  template <typename T> void write_row(const LinearArgs &args, const float *sums, T *out, int columns) const {
    for (int c = 0; c < columns; c += kLanes) {
      const int n = std::min(kLanes, columns - c);
      Vec value = load(sums + c);
      if (args.bias) value = value + load_as(args.bias + column + c, n);
      store_as(out + c, value, n);
    }
  }
};

// x itself where whole tiles can be read from it, else a padded copy of its rows from `copied_from` on.
struct LinearInput {
  const uint16_t *x, *copy = nullptr;
  int64_t stride, copy_stride = 0;
  int copied_from;

  LinearInput(const LinearArgs &args, Scratch &scratch)
      : x(static_cast<const uint16_t *>(args.x)), stride(args.x_stride), copied_from(args.m) {
    if (args.k % kBlockDepth)
      copied_from = 0;
    else if (args.m % kRowStep)
      copied_from = args.m / kLinearRows * kLinearRows;
    if (copied_from == args.m) return;
    copy_stride = (args.k + kBlockDepth - 1) / kBlockDepth * kBlockDepth;
    const int rows = (args.m - copied_from + kRowStep - 1) / kRowStep * kRowStep;
    auto *to = scratch.take<uint16_t>(size_t(rows) * copy_stride);
    std::memset(to, 0, sizeof(uint16_t) * size_t(rows) * copy_stride);
    for (int row = copied_from; row < args.m; ++row)
      std::memcpy(to + (row - copied_from) * copy_stride, x + row * stride, sizeof(uint16_t) * size_t(args.k));
    copy = to;
  }

  LinearRows rows(int first, int count) const {
    if (first < copied_from) return {x + first * stride, stride, count};
    return {copy + (first - copied_from) * copy_stride, copy_stride, count};
  }
};

// One call's shape, and how it is cut.
struct LinearJob {
  const LinearArgs &args;
  const LinearInput &input;
  int num_panels, num_blocks;
  int panels_per_group;
  bool stream_weights;  // a group's panels pass by each block of rows, rather than all rows by each panel
  bool stream_results;

  LinearJob(const LinearArgs &args, const LinearInput &input)
      : args(args), input(input), num_panels((args.n + kPanelColumns - 1) / kPanelColumns),
        num_blocks((args.k + kBlockDepth - 1) / kBlockDepth),
        panels_per_group(std::clamp(num_panels / (args.num_threads * 4), 1, 8)),
        stream_weights(int64_t(args.k) * kLinearRows * 2 <= kFirstCacheBytes) {
    const int64_t bytes = int64_t(args.m) * args.n * 2;
    stream_results = bytes > kStreamedBytes && args.n % kPanelColumns == 0 && reinterpret_cast<uintptr_t>(args.out) % 64 == 0;
  }

  const uint16_t *weights(int panel) const {
    return static_cast<const uint16_t *>(args.packed) + size_t(panel) * num_blocks * kBlockWeights;
  }
};

// Writes each result while the next is computed.
class LinearWriter {
 public:
  explicit LinearWriter(const LinearJob &job) : job_(job), before_{0, 0, 0, job.stream_results} {}
  ~LinearWriter() { before_.write(job_.args, sums_[turn_ ^ 1]); }

  template <bool stream_weights> void add(int row, int num_rows, int panel, Ahead ahead) {
    multiply_rows<stream_weights>(job_.input.rows(row, num_rows), job_.weights(panel), job_.num_blocks, ahead, sums_[turn_]);
    before_.write(job_.args, sums_[turn_ ^ 1]);
    before_ = {row, num_rows, panel * kPanelColumns, job_.stream_results};
    turn_ ^= 1;
  }

 private:
  const LinearJob &job_;
  LinearResult before_;
  int turn_ = 0;
  alignas(64) float sums_[2][kLinearRows * kPanelColumns];
};

// Rows [begin, end) times the panels of one group.
static void linear_group(const LinearJob &job, int begin, int end, int first_panel) {
  const int last_panel = std::min(first_panel + job.panels_per_group, job.num_panels);
  LinearWriter writer(job);
  if (job.stream_weights) {
    for (int row = begin; row < end; row += kLinearRows)
      for (int panel = first_panel; panel < last_panel; ++panel)
        writer.add<true>(row, std::min(kLinearRows, end - row), panel, {nullptr, 0});
    return;
  }
  const int passes = (end - begin + kLinearRows - 1) / kLinearRows;
  // With few rows the processor's own prefetching does better.
  const int lines = passes > 1 ? (kBlockDepth + passes - 1) / passes : 0;
  for (int panel = first_panel; panel < last_panel; ++panel) {
    Ahead ahead{reinterpret_cast<const char *>(job.weights(panel + 1)), lines};
    for (int row = begin; row < end; row += kLinearRows) {
      writer.add<false>(row, std::min(kLinearRows, end - row), panel, ahead);
      ahead.at += lines * job.num_blocks * 64;
    }
  }
}

static void linear(const LinearArgs &args) {
  const int64_t fitting = kCachedInputs / std::max(args.k, 1) / kLinearRows * kLinearRows;
  const int chunk = int(std::clamp<int64_t>(fitting, kLinearRows, std::max(args.m, kLinearRows)));
  Scratch &scratch = shared_scratch();
  scratch.reset();
  const LinearInput input(args, scratch);
  const LinearJob job(args, input);
#pragma omp parallel num_threads(args.num_threads)
  {
    begin_tiles();
    for (int begin = 0; begin < args.m; begin += chunk) {
      const int end = std::min(begin + chunk, args.m);
#pragma omp for schedule(dynamic, 1) nowait
      for (int panel = 0; panel < job.num_panels; panel += job.panels_per_group) linear_group(job, begin, end, panel);
    }
    end_tiles();
  }
}
