#include "attention_plan.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace {

// Enough rows to use keys and values well once they are in the first cache, few enough to share out among threads.
constexpr int kRowsPerTask = 192;

int divide_up(int a, int b) { return (a + b - 1) / b; }

struct SequenceSpan {
  int32_t query_begin, num_queries, first_position;
  int32_t shareable_segments;  // whole segments before its first query
  int32_t num_segments;
  const int32_t *block_table;
};

class Planner {
 public:
  explicit Planner(const AttentionArgs &args) : args_(args), blocks_per_segment_(kSegmentTokens / args.block_size) {}

  AttentionPlan build() {
    collect_sequences();
    for (size_t i = 0; i < spans_.size();) {
      size_t j = i + 1;
      while (j < spans_.size() && share_segment(spans_[i], spans_[j], 0)) ++j;
      add_subtree(i, j, 0, 0);
      i = j;
    }
    for (auto &phase : plan_.phases)
      std::stable_sort(phase.begin(), phase.end(), [](const PlanTask &a, const PlanTask &b) { return a.cost > b.cost; });
    return std::move(plan_);
  }

 private:
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
  }

  // Sequences [begin, end) agree on all segments before `segment`.
  void add_subtree(size_t begin, size_t end, int segment, size_t depth) {
    const SequenceSpan &first = spans_[begin], &last = spans_[end - 1];
    if (end - begin == 1) {
      add_node(begin, end, segment, first.num_segments, depth, true);
      return;
    }
    int stop = segment;
    while (share_segment(first, last, stop)) ++stop;
    if (stop > segment) {
      add_node(begin, end, segment, stop, depth, false);
      plan_.has_shared_nodes = true;
      ++depth;
    }
    for (size_t i = begin; i < end;) {
      size_t j = i + 1;
      while (j < end && share_segment(spans_[i], spans_[j], stop)) ++j;
      add_subtree(i, j, stop, depth);
      i = j;
    }
  }

  void add_node(size_t begin, size_t end, int segment_begin, int segment_end, size_t depth, bool ends) {
    const SequenceSpan &first = spans_[begin], &last = spans_[end - 1];
    const int query_begin = first.query_begin, query_end = last.query_begin + last.num_queries;
    plan_.nodes.push_back(
        {query_begin, query_end, segment_begin, segment_end, first.block_table, segment_begin == 0, ends});
    if (plan_.phases.size() <= depth) plan_.phases.resize(depth + 1);
    const int group = args_.num_heads / args_.num_kv_heads;
    const int num_queries = query_end - query_begin;
    const int num_parts = divide_up(num_queries * group, std::max(kRowsPerTask, group));
    const int per_part = divide_up(num_queries, num_parts);
    for (int head = 0; head < args_.num_kv_heads; ++head)
      for (int q = query_begin; q < query_end; q += per_part) {
        const int stop = std::min(q + per_part, query_end);
        plan_.phases[depth].push_back({int32_t(plan_.nodes.size()) - 1, head, q, stop, cost_of(q, stop, group)});
      }
  }

  // Proportional to time: reading a segment counts as much as computing about sixteen rows of it.
  int64_t cost_of(int query_begin, int query_end, int group) const {
    const PlanNode &node = plan_.nodes.back();
    int segments = node.segment_end - node.segment_begin;
    if (node.ends)
      segments = std::min(segments, plan_.queries[query_end - 1].position / kSegmentTokens + 1 - node.segment_begin);
    return int64_t(segments) * (divide_up((query_end - query_begin) * group, kLanes) + 1);
  }

  const AttentionArgs &args_;
  const int blocks_per_segment_;
  std::vector<SequenceSpan> spans_;
  AttentionPlan plan_;
};

}  // namespace

AttentionPlan plan_attention(const AttentionArgs &args) { return Planner(args).build(); }
