// out[M, N] = x[M, K] weight[N, K]^T + bias, or silu(gate) * up of two such products; weights bf16, or int8 with a scale
// per column and inputs quantized per row. Each output is one sum over K, whatever the rows beside it and the threads.
// Included once per level, inside that level's namespace, after linear_products.h and elementwise.h.

// What stays in the second cache while all panels pass by, and in the first.
constexpr int64_t kCachedInputBytes = int64_t(896) << 10;
constexpr int64_t kFirstCacheBytes = int64_t(40) << 10;
// Of a group of panels: it stays in the second cache beside the one that follows.
constexpr int kGroupBytes = 320 << 10;
// Results too large to be found in the second cache again are written past it.
constexpr int64_t kStreamedBytes = int64_t(4) << 20;

// The rows as the products read them: x itself where whole tiles can be read from it, else a padded copy of its rows
// from `copied_from` on.
struct LinearInput {
  const char *x, *copy = nullptr;
  const float *scales = nullptr;  // [M], int8 only
  int64_t stride, copy_stride = 0;
  int copied_from;

  LinearRows rows(int first, int count) const {
    if (first < copied_from) return {x + first * stride, stride, count};
    return {copy + (first - copied_from) * copy_stride, copy_stride, count};
  }
};

static LinearInput plain_input(const LinearArgs &args, int num_blocks, Scratch &scratch) {
  LinearInput input;
  input.x = static_cast<const char *>(args.x), input.stride = args.x_stride * int64_t(sizeof(uint16_t));
  input.copied_from = args.m;
  if (args.k % kBlockDepth)
    input.copied_from = 0;
  else if (args.m % kRowStep)
    input.copied_from = args.m / kLinearRows * kLinearRows;
  if (input.copied_from == args.m) return input;
  input.copy_stride = int64_t(num_blocks) * kRowBlockBytes;
  const int rows = (args.m - input.copied_from + kRowStep - 1) / kRowStep * kRowStep;
  char *to = scratch.take<char>(size_t(rows * input.copy_stride));
  std::memset(to, 0, size_t(rows * input.copy_stride));
  for (int row = input.copied_from; row < args.m; ++row)
    std::memcpy(to + (row - input.copied_from) * input.copy_stride, input.x + row * input.stride,
                sizeof(uint16_t) * size_t(args.k));
  input.copy = to;
  return input;
}

// round(x * 127 / max |x|) + 128; returns max |x| / 127. The 128 is taken off again by the column sums.
static float quantize_input(const uint16_t *x, int size, uint8_t *to) {
  Vec largest = zero();
  for (int i = 0; i < size; i += kLanes) {
    const Vec value = load_as(x + i, std::min(kLanes, size - i));
    largest = max(largest, max(value, zero() - value));
  }
  const float top = reduce_max(largest);
  const bool is_zero = top < kAsGoodAsZero;
  const Vec inverse = splat(is_zero ? 0.0f : 127.0f / top);
  for (int i = 0; i < size; i += kLanes) {
    const int n = std::min(kLanes, size - i);
    store_shifted(to + i, load_as(x + i, n) * inverse, n);
  }
  return is_zero ? 0.0f : top / 127.0f;
}

static LinearInput quantized_input(const LinearArgs &args, int num_blocks, Scratch &scratch) {
  LinearInput input;
  input.x = nullptr, input.stride = 0, input.copied_from = 0;
  input.copy_stride = int64_t(num_blocks) * kRowBlockBytes;
  const int rows = (args.m + kRowStep - 1) / kRowStep * kRowStep;
  char *to = scratch.take<char>(size_t(rows * input.copy_stride));
  float *scales = scratch.take<float>(size_t(args.m));
  std::memset(to + args.m * input.copy_stride, 0, size_t((rows - args.m) * input.copy_stride));
#pragma omp parallel for num_threads(args.num_threads) schedule(static) if (int64_t(args.m) * args.k > kThreadedElements)
  for (int row = 0; row < args.m; ++row) {
    char *at = to + row * input.copy_stride;
    const auto *x = static_cast<const uint16_t *>(args.x) + row * args.x_stride;
    scales[row] = quantize_input(x, args.k, reinterpret_cast<uint8_t *>(at));
    std::memset(at + args.k, 0, size_t(input.copy_stride - args.k));
  }
  input.copy = to, input.scales = scales;
  return input;
}

// A product's weights in groups of panels, of which a thread takes one at a time.
struct WeightGroups {
  const char *weights;
  int num_blocks, num_panels, panels_per_group, count;

  WeightGroups(const LinearArgs &args, int num_threads)
      : weights(static_cast<const char *>(args.packed)),
        num_blocks(std::max(1, (args.k * (args.column_scales ? 1 : 2) + kRowBlockBytes - 1) / kRowBlockBytes)),
        num_panels((args.n + kPanelColumns - 1) / kPanelColumns),
        panels_per_group(std::clamp(num_panels / (num_threads * 4), 1,
                                    std::clamp(kGroupBytes / (num_blocks * kWeightBlockBytes), 1, 8))),
        count((num_panels + panels_per_group - 1) / panels_per_group) {}

  const char *panel(int index) const { return weights + size_t(index) * size_t(num_blocks * kWeightBlockBytes); }
  const char *group(int index) const { return index < count ? panel(index * panels_per_group) : nullptr; }
  int panels_of(int group) const { return std::min(panels_per_group, num_panels - group * panels_per_group); }
};

// One call's shape, and how it is cut.
struct LinearJob {
  const LinearArgs &args;
  const LinearInput &input;
  const WeightGroups groups;
  bool stream_weights;  // a group's panels pass by each block of rows, rather than all rows by each panel
  bool stream_results;

  LinearJob(const LinearArgs &args, const LinearInput &input, const WeightGroups &groups)
      : args(args), input(input), groups(groups),
        stream_weights(int64_t(groups.num_blocks) * kRowBlockBytes * kLinearRows <= kFirstCacheBytes) {
    const int64_t bytes = int64_t(args.m) * args.n * (args.out_dtype == kFloat32 ? 4 : 2);
    const bool aligned = args.n % kPanelColumns == 0 && reinterpret_cast<uintptr_t>(args.out) % 64 == 0;
    stream_results = bytes > kStreamedBytes && aligned && !args.gated;
  }
};

// What becomes of the sums of some rows of one panel.
struct LinearResult {
  int row, num_rows, column;

  // Rows [first, last) of them.
  void write(const LinearJob &job, float *sums, int first, int last) const {
    const LinearArgs &args = job.args;
    const int columns = std::min(kPanelColumns, args.n - column);
    if (job.input.scales) scale(args, sums, job.input.scales + row, columns, first, last);
    sums += first * kPanelColumns;
    for (int r = first; r < last; ++r, sums += kPanelColumns) {
      if (args.bias)
        for (int c = 0; c < columns; c += kLanes)
          store(sums + c, load(sums + c) + load_as(args.bias + column + c, std::min(kLanes, columns - c)));
      if (args.residual) add_row(static_cast<const uint16_t *>(args.residual) + at(args, r), sums, columns);
      if (args.gated)
        gate_row(args, sums, row + r);
      else if (args.out_dtype == kFloat32)
        write_row(static_cast<float *>(args.out) + at(args, r), sums, columns, job.stream_results);
      else
        write_row(static_cast<uint16_t *>(args.out) + at(args, r), sums, columns, job.stream_results);
    }
  }

 private:
  size_t at(const LinearArgs &args, int r) const { return size_t(row + r) * args.n + column; }

  // Exact integers become products of numbers: x w = (sum - offset) row_scale column_scale.
  void scale(const LinearArgs &args, float *sums, const float *row_scales, int columns, int first, int last) const {
    for (int c = 0; c < columns; c += kLanes) {
      const int n = std::min(kLanes, columns - c);
      const Ints offsets = load_ints(args.column_offsets + column + c, n);
      const Vec column_scale = load_as(args.column_scales + column + c, n);
      for (int r = first; r < last; ++r) {
        float *at = sums + r * kPanelColumns + c;
        store(at, subtract(at, offsets) * splat(row_scales[r]) * column_scale);
      }
    }
  }

  // The result is rounded first, as if it had been written.
  static void add_row(const uint16_t *residual, float *sums, int columns) {
    for (int c = 0; c < columns; c += kLanes) {
      uint16_t rounded[kLanes];
      store_bf16(rounded, load(sums + c));
      store(sums + c, load_bf16(rounded) + load_as(residual + c, std::min(kLanes, columns - c)));
    }
  }

  // A panel holds sixteen gates, then their sixteen ups; both are rounded first, as if they had been written.
  void gate_row(const LinearArgs &args, const float *sums, int row) const {
    const int first = column / 2, n = std::min(kLanes, args.gated - first);
    if (n <= 0) return;
    uint16_t rounded[kPanelColumns];
    store_bf16(rounded, load(sums)), store_bf16(rounded + kLanes, load(sums + kLanes));
    store_as(static_cast<uint16_t *>(args.out) + size_t(row) * args.gated + first,
             silu(load_bf16(rounded)) * load_bf16(rounded + kLanes), n);
  }

  static void write_row(uint16_t *out, const float *sums, int columns, bool stream) {
    if (columns == kPanelColumns) return store_bf16_32(out, load(sums), load(sums + kLanes), stream);
    for (int c = 0; c < columns; c += kLanes) store_as(out + c, load(sums + c), std::min(kLanes, columns - c));
  }
  static void write_row(float *out, const float *sums, int columns, bool stream) {
    if (columns == kPanelColumns && stream) return stream_32(out, load(sums), load(sums + kLanes));
    for (int c = 0; c < columns; c += kLanes) store_as(out + c, load(sums + c), std::min(kLanes, columns - c));
  }
};

// Sums that are still to be written, some rows at a time.
struct PendingResult {
  const LinearJob &job;
  LinearResult result;
  float *sums;
  int rows_per_step, next = 0;

  void step() { write(std::min(next + rows_per_step, result.num_rows)); }
  void finish() { write(result.num_rows); }

  void write(int end) {
    if (next < end) result.write(job, sums, next, end);
    next = std::max(next, end);
  }
};

// Writes each result while the next is computed.
template <bool int8> class LinearWriter {
 public:
  explicit LinearWriter(const LinearJob &job) : job_(job) {}
  ~LinearWriter() { before_.write(job_, sums_[turn_ ^ 1], 0, before_.num_rows); }

  template <bool stream_weights> void add(int row, int num_rows, int panel, Ahead ahead) {
    PendingResult pending{job_, before_, sums_[turn_ ^ 1], (kLinearRows + num_blocks() - 1) / num_blocks()};
    multiply_rows<int8, stream_weights>(job_.input.rows(row, num_rows), job_.groups.panel(panel), num_blocks(), ahead,
                                        pending, sums_[turn_]);
    before_ = {row, num_rows, panel * kPanelColumns};
    turn_ ^= 1;
  }

 private:
  int num_blocks() const { return job_.groups.num_blocks; }

  const LinearJob &job_;
  LinearResult before_{0, 0, 0};
  int turn_ = 0;
  alignas(64) float sums_[2][kLinearRows * kPanelColumns];
};

// Rows [begin, end) times the panels of one group, while the weights at `following` are fetched, as many; or null.
template <bool int8> static void linear_group(const LinearJob &job, int begin, int end, int group, const char *following) {
  const int first_panel = group * job.groups.panels_per_group, last_panel = first_panel + job.groups.panels_of(group);
  const int passes = (end - begin + kLinearRows - 1) / kLinearRows;
  const int lines = (kWeightBlockBytes / 64 + passes - 1) / passes;
  Ahead ahead{following, following ? lines : 0};
  LinearWriter<int8> writer(job);
  const auto go_on = [&] { ahead.at += ahead.lines_per_block * job.groups.num_blocks * 64; };
  if (job.stream_weights) {
    for (int row = begin; row < end; row += kLinearRows)
      for (int panel = first_panel; panel < last_panel; ++panel, go_on())
        writer.template add<true>(row, std::min(kLinearRows, end - row), panel, ahead);
    return;
  }
  for (int panel = first_panel; panel < last_panel; ++panel) {
    const char *next = panel + 1 < last_panel ? job.groups.panel(panel + 1) : following;
    ahead = {next, next ? lines : 0};
    for (int row = begin; row < end; row += kLinearRows, go_on())
      writer.template add<false>(row, std::min(kLinearRows, end - row), panel, ahead);
  }
}

// A thread takes the next group while it still computes one, so that it knows what to fetch; its first is the one that it
// fetched in the product before.
template <bool int8> static void run_linear(const LinearJob &job) {
  const LinearArgs &args = job.args;
  const WeightGroups &groups = job.groups;
  const int64_t fitting = kCachedInputBytes / (int64_t(groups.num_blocks) * kRowBlockBytes) / kLinearRows * kLinearRows;
  const int chunk = int(std::clamp<int64_t>(fitting, kLinearRows, std::max(args.m, kLinearRows)));
  const int num_tasks = groups.count * ((args.m + chunk - 1) / chunk), num_threads = args.num_threads;
  int next_task = num_threads;
#pragma omp parallel for num_threads(num_threads) schedule(static, 1)
  for (int thread = 0; thread < num_threads; ++thread) {
    begin_tiles();
    for (int task = thread, next; task < num_tasks; task = next) {
#pragma omp atomic capture
      next = next_task++;
      const char *following = nullptr;
      if (next < num_tasks)
        following = groups.group(next % groups.count);
      else if (args.next)
        following = WeightGroups(*args.next, num_threads).group(thread);
      const int begin = task / groups.count * chunk;
      linear_group<int8>(job, begin, std::min(begin + chunk, args.m), task % groups.count, following);
    }
    end_tiles();
  }
}

static void linear(const LinearArgs &args) {
  Scratch &scratch = shared_scratch();
  scratch.reset();
  const WeightGroups groups(args, args.num_threads);
  const LinearInput input = args.column_scales ? quantized_input(args, groups.num_blocks, scratch)
                                               : plain_input(args, groups.num_blocks, scratch);
  const LinearJob job(args, input, groups);
  args.column_scales ? run_linear<true>(job) : run_linear<false>(job);
}
