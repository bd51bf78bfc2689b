#include "attention_plan.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace {

// Enough rows to use keys and values well once they are in the first cache, few enough to share out among threads; a part
// that is cut for balance keeps the fewest, since each piece reads all keys.
constexpr int kMostRows = 192, kFewestRows = 64;

// A thread's share of a phase is at least this many tasks, so that all end at about the same time.
constexpr int kLongTasks = 3, kShortTasks = 8;

// Sequences that decode behind one prefix are cut into branches of at least so many rows: each reads the prefix.
constexpr int kBranchRows = 96;

template <typename T> T divide_up(T a, T b) { return (a + b - 1) / b; }

struct SequenceSpan {
  int32_t query_begin, num_queries, first_position;
  int32_t shareable_segments;  // whole segments before its first query
  int32_t num_segments;
  const int32_t *block_table;
};

class Planner {
 public:
  explicit Planner(const AttentionArgs &args)
      : args_(args), blocks_per_segment_(kSegmentTokens / args.block_size),
        group_(args.num_heads / args.num_kv_heads) {}

  AttentionPlan build() {
    collect_sequences();
    if (!plan_branches()) plan_levels();
    return std::move(plan_);
  }

 private:
  // Parts by how many nodes lie before their own: each level needs results of the ones before.
  using Levels = std::vector<std::vector<PlanPart>>;

  // All threads share each level.
  void plan_levels() {
    Levels levels;
    for (const auto &[begin, end] : groups_) add_subtree(begin, end, 0, levels);
    plan_phases(levels);
  }

  void plan_phases(const Levels &levels) {
    for (size_t i = 0; i < levels.size(); ++i) {
      if (plan_.phases.size() <= i) plan_.phases.resize(i + 1);
      add_tasks(plan_.phases[i], cut_long_ones(levels[i]));
    }
    // Longest first.
    for (auto &phase : plan_.phases)
      std::stable_sort(phase.begin(), phase.end(), [](const PlanTask &a, const PlanTask &b) { return a.cost > b.cost; });
  }

  // As plan_levels(), but sequences that decode behind a prefix are a task with it: its results need not go to another
  // thread, and none waits for them. False, and nothing done, where there are no such tasks, or one is more than a
  // thread's share.
  bool plan_branches() {
    Levels levels;
    std::vector<Levels> branches;
    for (const auto &[begin, end] : groups_) {
      if (!is_decoded_together(begin, end)) {
        add_subtree(begin, end, 0, levels);
        continue;
      }
      const int rows = int(end - begin) * group_, count = std::max(rows / kBranchRows, 1);
      for (int i = 0; i < count; ++i) {
        branches.emplace_back();
        add_subtree(begin + (end - begin) * i / count, begin + (end - begin) * (i + 1) / count, 0, branches.back());
      }
    }
    int64_t total = cost_of(levels), most = 0;
    for (const Levels &branch : branches) total += cost_of(branch), most = std::max(most, cost_of(branch));
    if (branches.empty() || most > total / args_.num_threads * 17 / 16) {
      plan_.nodes.clear(), plan_.has_shared_nodes = false;
      return false;
    }
    plan_.phases.resize(1);
    for (const Levels &branch : branches) add_branch(plan_.phases[0], branch);
    plan_phases(levels);
    return true;
  }

  bool is_decoded_together(size_t begin, size_t end) const {
    const auto decodes = [](const SequenceSpan &span) { return span.num_queries == 1; };
    return end - begin > 1 && std::all_of(spans_.data() + begin, spans_.data() + end, decodes);
  }

  void add_branch(std::vector<PlanTask> &tasks, const Levels &branch) {
    const int begin = int(plan_.runs.size());
    for (const auto &level : branch)
      for (int width : {0, kLanes, 4}) {
        const int first = int(plan_.parts.size());
        for (const PlanPart &part : level)
          if (width_of(part) == width) plan_.parts.push_back(part);
        if (const int end = int(plan_.parts.size()); end > first) plan_.runs.push_back({first, end});
      }
    tasks.push_back({begin, int(plan_.runs.size()), cost_of(branch)});
  }

  bool share_segment(const SequenceSpan &a, const SequenceSpan &b, int segment) const {
    return segment < a.shareable_segments && segment < b.shareable_segments && compare_segment(a, b, segment) == 0;
  }

  int compare_segment(const SequenceSpan &a, const SequenceSpan &b, int segment) const {
    const size_t at = size_t(segment) * blocks_per_segment_;
    return std::memcmp(a.block_table + at, b.block_table + at, sizeof(int32_t) * blocks_per_segment_);
  }

  // Orders sequences so that those with a common physical prefix are neighbours.
  bool precedes(const SequenceSpan &a, const SequenceSpan &b) const {
    const int common = std::min(a.shareable_segments, b.shareable_segments);
    for (int segment = 0; segment < common; ++segment)
      if (const int order = compare_segment(a, b, segment)) return order < 0;
    return a.shareable_segments < b.shareable_segments;
  }

  void collect_sequences() {
    for (int s = 0; s < args_.num_sequences; ++s) {
      const int begin = args_.query_starts[s], count = args_.query_starts[s + 1] - begin;
      if (count == 0) continue;
      const int first_position = args_.context_lens[s] - count;
      spans_.push_back({begin, count, first_position, args_.share ? first_position / kSegmentTokens : 0,
                        divide_up(args_.context_lens[s], kSegmentTokens), args_.block_tables + s * args_.table_stride});
    }
    if (args_.share)
      std::stable_sort(spans_.begin(), spans_.end(), [this](const auto &a, const auto &b) { return precedes(a, b); });
    for (auto &span : spans_) {
      const int token = span.query_begin;
      span.query_begin = int32_t(plan_.queries.size());
      for (int i = 0; i < span.num_queries; ++i) plan_.queries.push_back({token + i, span.first_position + i});
    }
    for (size_t i = 0, j; i < spans_.size(); i = j) {
      for (j = i + 1; j < spans_.size() && share_segment(spans_[i], spans_[j], 0);) ++j;
      groups_.push_back({i, j});
    }
  }

  // Sequences [begin, end) agree on all segments before `segment`.
  void add_subtree(size_t begin, size_t end, int segment, Levels &levels, size_t depth = 0) {
    const SequenceSpan &first = spans_[begin], &last = spans_[end - 1];
    if (end - begin == 1) {
      add_node(begin, end, segment, first.num_segments, levels, depth);
      return;
    }
    int stop = segment;
    while (share_segment(first, last, stop)) ++stop;
    if (stop > segment) {
      add_node(begin, end, segment, stop, levels, depth);
      plan_.has_shared_nodes = true;
      ++depth;
    }
    for (size_t i = begin; i < end;) {
      size_t j = i + 1;
      while (j < end && share_segment(spans_[i], spans_[j], stop)) ++j;
      add_subtree(i, j, stop, levels, depth);
      i = j;
    }
  }

  void add_node(size_t begin, size_t end, int segment_begin, int segment_end, Levels &levels, size_t depth) {
    const SequenceSpan &first = spans_[begin], &last = spans_[end - 1];
    const int query_begin = first.query_begin, query_end = last.query_begin + last.num_queries;
    plan_.nodes.push_back(
        {query_begin, query_end, segment_begin, segment_end, first.block_table, segment_begin == 0, end - begin == 1});
    if (levels.size() <= depth) levels.resize(depth + 1);
    const int node = int(plan_.nodes.size()) - 1, heads = heads_per_part(query_end - query_begin);
    for (int head = 0; head < args_.num_kv_heads; head += heads)
      add_parts(levels[depth], {node, head, heads, query_begin, query_end, 0}, kMostRows);
  }

  // With few rows, keys and values are read once and not again, and a block's lie side by side for all heads.
  int heads_per_part(int num_queries) const {
    const bool few_rows = num_queries * group_ <= kLanes;
    return few_rows && args_.num_sequences >= kShortTasks * args_.num_threads ? args_.num_kv_heads : 1;
  }

  // Cuts `whole` evenly into parts of at most `most_rows` rows or one query.
  void add_parts(std::vector<PlanPart> &parts, const PlanPart &whole, int most_rows) const {
    const int num_queries = whole.query_end - whole.query_begin;
    const int count = divide_up(num_queries, std::max(most_rows / group_, 1));
    for (int i = 0; i < count; ++i) {
      PlanPart part = whole;
      part.query_begin = whole.query_begin + int(int64_t(num_queries) * i / count);
      part.query_end = whole.query_begin + int(int64_t(num_queries) * (i + 1) / count);
      part.cost = cost_of(part);
      parts.push_back(part);
    }
  }

  // What a thread may take at a time of parts that cost so much together.
  int64_t share_of(const std::vector<PlanPart> &parts, int tasks_per_thread) const {
    int64_t total = 0;
    for (const PlanPart &part : parts) total += part.cost;
    return total / (tasks_per_thread * args_.num_threads) + 1;
  }

  std::vector<PlanPart> cut_long_ones(const std::vector<PlanPart> &parts) const {
    const int64_t most = share_of(parts, kLongTasks);
    std::vector<PlanPart> cut;
    for (const PlanPart &part : parts)
      add_parts(cut, part, std::max(int(divide_up<int64_t>(rows_of(part), divide_up(part.cost, most))), kFewestRows));
    return cut;
  }

  // Parts with few rows are joined: their tiles take turns, and the first keys of one are fetched while the last of the one
  // before are computed.
  void add_tasks(std::vector<PlanTask> &tasks, const std::vector<PlanPart> &parts) {
    const int64_t most = share_of(parts, kShortTasks);
    int width_before = 0;
    for (const PlanPart &part : parts) {
      const int index = int(plan_.parts.size()), width = width_of(part);
      if (width && width == width_before && tasks.back().cost + part.cost <= most) {
        plan_.runs.back().part_end = index + 1, tasks.back().cost += part.cost;
      } else {
        const int run = int(plan_.runs.size());
        plan_.runs.push_back({index, index + 1}), tasks.push_back({run, run + 1, part.cost});
      }
      width_before = width;
      plan_.parts.push_back(part);
    }
  }

  int rows_of(const PlanPart &part) const { return (part.query_end - part.query_begin) * group_; }
  // Of the tiles in which parts take turns; 0: by themselves.
  int width_of(const PlanPart &part) const { return rows_of(part) <= 4 ? 4 : rows_of(part) <= kLanes ? kLanes : 0; }

  // Proportional to time: reading a segment counts as much as computing about sixteen rows of it.
  int64_t cost_of(const PlanPart &part) const {
    const PlanNode &node = plan_.nodes[part.node];
    int segments = node.segment_end - node.segment_begin;
    if (node.ends)
      segments =
          std::min(segments, plan_.queries[part.query_end - 1].position / kSegmentTokens + 1 - node.segment_begin);
    return int64_t(segments) * part.num_kv_heads * (divide_up(rows_of(part), kLanes) + 1);
  }

  static int64_t cost_of(const Levels &levels) {
    int64_t cost = 0;
    for (const auto &level : levels)
      for (const PlanPart &part : level) cost += part.cost;
    return cost;
  }

  const AttentionArgs &args_;
  const int blocks_per_segment_, group_;
  std::vector<SequenceSpan> spans_;
  std::vector<std::pair<size_t, size_t>> groups_;  // spans that share their first segment
  AttentionPlan plan_;
};

}  // namespace

AttentionPlan plan_attention(const AttentionArgs &args) { return Planner(args).build(); }
