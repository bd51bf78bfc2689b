// Which rows meet which segments: found once per call, before any arithmetic.
//
// Sequences whose leading segments lie in the same physical blocks form a node, so those keys and values are read once
// for all of them. Nodes are a tree; a child goes on from its parent's running result, in segment order.
#pragma once

#include <vector>

#include "api.h"

struct PlannedQuery {
  int32_t token;     // row of q and out
  int32_t position;  // in its context: sees keys up to and including it
};

struct PlanNode {
  int32_t query_begin, query_end;      // in AttentionPlan::queries
  int32_t segment_begin, segment_end;  // every query may see keys of all of these but the last, which is causal
  const int32_t *block_table;          // of one of its sequences: equal in this range for all
  bool starts, ends;                   // no parent; no child
};

// Some rows of a node for some KV heads.
struct PlanPart {
  int32_t node, kv_head, num_kv_heads, query_begin, query_end;
  int64_t cost;
};

// Parts whose tiles take turns: one with many rows a head, or several with 1 to 4, or with 5 to 16.
struct PlanRun {
  int32_t part_begin, part_end;  // in AttentionPlan::parts
};

// Runs that a thread takes one after the other; a later one may need results of an earlier one.
struct PlanTask {
  int32_t run_begin, run_end;  // in AttentionPlan::runs; their parts are neighbours
  int64_t cost;
};

struct AttentionPlan {
  std::vector<PlannedQuery> queries;
  std::vector<PlanNode> nodes;
  std::vector<PlanPart> parts;
  std::vector<PlanRun> runs;
  std::vector<std::vector<PlanTask>> phases;  // a phase needs only results of earlier ones
  bool has_shared_nodes = false;
};

AttentionPlan plan_attention(const AttentionArgs &args);
