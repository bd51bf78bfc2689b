// Keys and values on their way from memory before they are needed. Included once per level, inside that level's namespace.

// Memory to fetch: some neighbouring lines.
struct Region {
  const char *from, *end;
};

// Fetches the keys and values that come next a few lines at a time between the arithmetic of those before (all at once they
// would only queue), in the order of their addresses, which the processor's own prefetcher follows. Loops work on a copy of
// it, which the compiler keeps in registers: in memory each step would wait for what the one before has written.
class Prefetcher {
 public:
  // The regions must stay as they are. Their lines are spread over `num_steps`, but more than `most` at a time would queue.
  void begin(const Region *regions, int num_regions, int num_steps, int most) {
    next_ = regions, last_ = regions + num_regions, at_ = end_ = nullptr;
    int num_groups = 0;
    for (const Region *region = regions; region < last_; ++region)
      num_groups += int((region->end - region->from + kGroup - 1) / kGroup);
    num_steps_ = num_steps, due_ = 0, groups_ = std::min(num_groups, num_steps * (most * kLine / kGroup));
  }
  void step(int count = 1) {
    for (due_ += count * groups_; due_ >= num_steps_; due_ -= num_steps_) {
      if (at_ >= end_) {
        if (next_ == last_) return;
        at_ = next_->from, end_ = next_++->end;
      }
      for (int line = 0; line < kGroup; line += kLine) __builtin_prefetch(at_ + line, 0, 2);
      at_ += kGroup;
    }
  }

 private:
  static constexpr int kLine = 64, kGroup = 4 * kLine;  // bytes

  const char *at_ = nullptr, *end_ = nullptr;
  const Region *next_ = nullptr, *last_ = nullptr;
  int num_steps_ = 1, groups_ = 0, due_ = 0;  // groups of lines are due in every num_steps_
};

// The segments that a part's rows see, of its node's. Those before every row's window may lie in blocks that were given back.
struct SegmentRange {
  int begin, end;
  int last_position;
};

static inline SegmentRange segments_of(const AttentionArgs &args, const AttentionPlan &plan, const PlanPart &part) {
  const PlanNode &node = plan.nodes[part.node];
  const int last = plan.queries[part.query_end - 1].position;
  int begin = node.segment_begin;
  if (args.window) {
    int first = last;
    for (int query = part.query_begin; query < part.query_end; ++query)
      first = std::min(first, plan.queries[query].position);
    begin = std::max(begin, (first + 1 - args.window) / kSegmentTokens);
  }
  return {begin, std::min(node.segment_end, last / kSegmentTokens + 1), last};
}

// The tasks of a phase, for all threads.
class TaskQueue {
 public:
  TaskQueue(const std::vector<PlanTask> &tasks, int num_threads) : tasks_(tasks), next_(num_threads) {}

  // Each thread's first is its own; null: there are no more.
  const PlanTask *at(int index) const { return index < int(tasks_.size()) ? &tasks_[size_t(index)] : nullptr; }
  const PlanTask *take() {
    int index;
#pragma omp atomic capture
    index = next_++;
    return at(index);
  }

 private:
  const std::vector<PlanTask> &tasks_;
  int next_;
};

// A thread's tasks, and their segments in the order in which they are computed, each fetched while the one before is: the
// next task is taken beside the last segment of this one.
template <typename Cache> class FetchStream {
 public:
  FetchStream(const AttentionArgs &args, const AttentionPlan &plan, TaskQueue &queue, int thread)
      : args_(args), plan_(plan), queue_(queue) {
    look_at(queue.at(thread));
  }

  // The task after the one whose segments are all computed, or null.
  const PlanTask *next_task() {
    if (!has_next_) look_at(queue_.take());
    has_next_ = false;
    return next_;
  }

  // Another segment is computed, in so many steps.
  void begin_segment(int num_steps) {
    if (part_ < end_ && ++segment_ >= range_.end) ++part_, find_segments();
    if (part_ == end_ && !has_next_) look_at(queue_.take());
    ahead.begin(regions_, part_ < end_ ? find_regions() : 0, num_steps, kMostLinesPerStep);
  }

  Prefetcher ahead;

 private:
  static constexpr int kMostLinesPerStep = 8;

  void look_at(const PlanTask *task) {
    next_ = task, has_next_ = true;
    if (!task) return;
    part_ = plan_.runs[task->run_begin].part_begin, end_ = plan_.runs[task->run_end - 1].part_end;
    find_segments();
  }

  void find_segments() {
    for (; part_ < end_; ++part_) {
      range_ = segments_of(args_, plan_, plan_.parts[part_]), segment_ = range_.begin;
      if (range_.begin < range_.end) return;
    }
  }

  int find_regions() {
    const PlanPart &part = plan_.parts[part_];
    const int num_keys = std::min(kSegmentTokens, range_.last_position + 1 - segment_ * kSegmentTokens);
    const int32_t *block = plan_.nodes[part.node].block_table + segment_ * (kSegmentTokens / args_.block_size);
    const size_t rows = size_t(args_.block_size * part.num_kv_heads);
    Region *region = regions_;
    const auto add = [&](const void *cache, int64_t row, size_t row_bytes) {
      const char *from = static_cast<const char *>(cache) + size_t(row) * row_bytes;
      *region++ = {from, from + rows * row_bytes};
    };
    for (int key = 0; key < num_keys; key += args_.block_size, ++block) {
      // The rows of a KV head of a block follow those of the one before.
      const int64_t row = (int64_t(*block) * args_.num_kv_heads + part.kv_head) * args_.block_size;
      if (args_.k_scales) add(args_.k_scales, row, sizeof(float)), add(args_.v_scales, row, sizeof(float));
      add(args_.k_cache, row, sizeof(Cache) * size_t(args_.head_dim_k));
      add(args_.v_cache, row, sizeof(Cache) * size_t(args_.head_dim_v));
    }
    return int(region - regions_);
  }

  const AttentionArgs &args_;
  const AttentionPlan &plan_;
  TaskQueue &queue_;
  const PlanTask *next_ = nullptr;
  bool has_next_ = false;  // is at next_, though segments of the task before are still computed
  int part_ = 0, end_ = 0, segment_ = 0;
  SegmentRange range_{};
  Region regions_[4 * kSegmentTokens];  // keys, values and their scales of blocks of one token
};
