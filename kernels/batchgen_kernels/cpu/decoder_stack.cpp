// A model of the llama kind in one call: only the order of the kernels stands here, so each of its results has the bits
// that the kernels give when they are called one by one.
#include <cstring>

#include "attention_plan.h"
#include "scratch.h"

namespace {

struct KeptPlan {
  int64_t step = -1;
  int32_t num_heads = 0, num_kv_heads = 0;
  AttentionPlan plan;
};

// All layers of a step that have the same heads share one plan.
const AttentionPlan &plan_of_step(const AttentionArgs &args, int64_t step) {
  static thread_local KeptPlan kept;
  if (kept.step != step || kept.num_heads != args.num_heads || kept.num_kv_heads != args.num_kv_heads)
    kept = {step, args.num_heads, args.num_kv_heads, plan_attention(args)};
  return kept.plan;
}

// Rows of a matrix in another order; bf16.
struct Rows {
  const int32_t *indexes;
  int count;

  void gather(const uint16_t *from, int width, uint16_t *to) const {
    for (int i = 0; i < count; ++i)
      std::memcpy(to + size_t(i) * size_t(width), from + int64_t(indexes[i]) * width, sizeof(uint16_t) * size_t(width));
  }

  bool are_below(int64_t end) const {
    for (int i = 0; i < count; ++i)
      if (indexes[i] < 0 || indexes[i] >= end) return false;
    return true;
  }

  bool is_all_of(int num_rows) const {
    for (int i = 0; i < count; ++i)
      if (indexes[i] != i) return false;
    return count == num_rows;
  }
};

// Where the tokens of a step stand, from where its chunks begin.
class TokenPlaces {
 public:
  TokenPlaces(const DecoderModelStepArgs &args, int block_size, Scratch &memory) : args_(args) {
    const size_t num_tokens = size_t(args.num_tokens), num_sequences = size_t(args.num_sequences);
    positions_ = memory.take<int64_t>(num_tokens), slots_ = memory.take<int64_t>(num_tokens);
    query_starts_ = memory.take<int32_t>(num_sequences + 1), context_lens_ = memory.take<int32_t>(num_sequences);
    int token = query_starts_[0] = 0;
    for (int s = 0; s < args.num_sequences; ++s) {
      const int32_t *table = args.block_tables + s * args.table_stride;
      const int end = args.starts[s] + args.counts[s];
      for (int position = args.starts[s]; position < end; ++position, ++token) {
        positions_[token] = position;
        slots_[token] = int64_t(table[position / block_size]) * block_size + position % block_size;
      }
      query_starts_[s + 1] = token, context_lens_[s] = end;
    }
  }

  static DecoderStatus check(const DecoderModelStepArgs &args) {
    int64_t num_tokens = 0;
    for (int s = 0; s < args.num_sequences; ++s) {
      if (args.counts[s] < 0) return kNoSuchChunk;
      if (args.starts[s] < 0 || args.starts[s] + int64_t(args.counts[s]) > args.num_positions) return kNoSuchPosition;
      num_tokens += args.counts[s];
    }
    return num_tokens == args.num_tokens ? kDone : kNoSuchChunk;
  }

  DecoderStepArgs for_layers() const {
    return {args_.cos, args_.sin, positions_, slots_, args_.block_tables, query_starts_, context_lens_,
            args_.table_stride, args_.step, args_.num_tokens, args_.num_sequences, args_.rotated, args_.angle_dtype,
            args_.num_threads};
  }

 private:
  const DecoderModelStepArgs &args_;
  int64_t *positions_, *slots_;
  int32_t *query_starts_, *context_lens_;
};

class LayerRun {
 public:
  // `after`: the product after the layer's last, or null.
  LayerRun(const KernelTable &kernels, const DecoderLayerArgs &layer, const LinearArgs *after, const DecoderStepArgs &step,
           void *hidden)
      : kernels_(kernels), layer_(layer), after_(after), step_(step), num_tokens_(step.num_tokens), features_(layer.qkv.k),
        queries_(layer.num_heads * layer.head_dim), keys_(layer.num_kv_heads * layer.head_dim),
        stream_(static_cast<uint16_t *>(hidden)) {
    workspace().reset();
    normed_ = take_rows(features_), qkv_ = take_rows(layer.qkv.n);
    attended_ = take_rows(queries_), gated_ = take_rows(layer.gate_up.gated);
  }

  void run() {
    attend_tokens();
    finish();
  }

  // As run(), but only the wanted tokens are finished; they lie side by side in the result.
  const uint16_t *run_for(const Rows &wanted) {
    attend_tokens();
    uint16_t *attended = take_rows(queries_), *stream = take_rows(features_);
    wanted.gather(attended_, queries_, attended), wanted.gather(stream_, features_, stream);
    attended_ = attended, stream_ = stream, num_tokens_ = wanted.count;
    if (wanted.count) finish();
    return stream_;
  }

 private:
  static Scratch &workspace() {
    static thread_local Scratch memory;
    return memory;
  }

  uint16_t *take_rows(int width) { return workspace().take<uint16_t>(size_t(step_.num_tokens) * size_t(width)); }

  void attend_tokens() {
    normalise(layer_.attention_norm, layer_.attention_eps);
    multiply(layer_.qkv, normed_, features_, qkv_, &layer_.attention_out);
    rotate_and_store();
    attend();
  }

  void finish() {
    add_product(layer_.attention_out, attended_, queries_, &layer_.gate_up);
    normalise(layer_.mlp_norm, layer_.mlp_eps);
    multiply(layer_.gate_up, normed_, features_, gated_, &layer_.down);
    add_product(layer_.down, gated_, layer_.gate_up.gated, after_);
  }

  void normalise(const void *weight, float eps) {
    kernels_.rms_norm({stream_, nullptr, weight, normed_, nullptr, features_, 0, num_tokens_, features_, kBFloat16,
                       layer_.norm_dtype, eps, step_.num_threads});
  }

  void add_product(LinearArgs product, const void *x, int width, const LinearArgs *next) {
    product.residual = stream_;
    multiply(product, x, width, stream_, next);
  }

  void multiply(LinearArgs product, const void *x, int width, void *out, const LinearArgs *next) {
    product.x = x, product.x_stride = width, product.out = out, product.out_dtype = kBFloat16;
    product.m = num_tokens_, product.num_threads = step_.num_threads, product.next = next;
    kernels_.linear(product);
  }

  // Heads of queries, keys and values lie side by side; the former two are rotated in place.
  void rotate_and_store() {
    const int64_t stride = layer_.qkv.n;
    const uint16_t *k = qkv_ + queries_;
    kernels_.rotate_and_store(
        {qkv_, step_.cos, step_.sin, step_.positions, qkv_, stride, layer_.head_dim, stride, layer_.head_dim,
         step_.rotated, step_.rotated, num_tokens_, layer_.num_heads + layer_.num_kv_heads, layer_.head_dim,
         step_.rotated, kBFloat16, step_.angle_dtype, step_.num_threads},
        {k, k + keys_, layer_.k_cache, layer_.v_cache, layer_.k_scales, layer_.v_scales, step_.slots, stride,
         layer_.head_dim, stride, layer_.head_dim, num_tokens_, layer_.num_kv_heads, layer_.head_dim, layer_.head_dim,
         layer_.block_size, kBFloat16, layer_.kv_dtype, step_.num_threads});
  }

  void attend() {
    const AttentionArgs args = {
        qkv_, layer_.k_cache, layer_.v_cache, layer_.k_scales, layer_.v_scales, step_.block_tables, step_.query_starts,
        step_.context_lens, nullptr, attended_, layer_.qkv.n, layer_.head_dim, step_.table_stride, step_.num_sequences,
        layer_.num_heads, layer_.num_kv_heads, layer_.head_dim, layer_.head_dim, layer_.block_size, kBFloat16,
        layer_.kv_dtype, layer_.window, 1, layer_.scale, 0.0f, step_.num_threads};
    kernels_.attention(args, plan_of_step(args, step_.step));
  }

  const KernelTable &kernels_;
  const DecoderLayerArgs &layer_;
  const LinearArgs *const after_;
  const DecoderStepArgs &step_;
  int num_tokens_;
  const int features_, queries_, keys_;
  uint16_t *stream_, *normed_, *qkv_, *attended_, *gated_;
};

}  // namespace

void run_decoder_layers(const KernelTable &kernels, const DecoderLayerArgs *const *layers, int num_layers,
                        const LinearArgs *after, void *hidden, const DecoderStepArgs &step) {
  for (int i = 0; i < num_layers; ++i)
    LayerRun(kernels, *layers[i], i + 1 < num_layers ? &layers[i + 1]->qkv : after, step, hidden).run();
}

DecoderStatus run_decoder_model(const KernelTable &kernels, const DecoderModelArgs &model,
                                const DecoderModelStepArgs &args) {
  const Rows embedded{args.token_ids, args.num_tokens}, wanted{args.wanted, args.num_wanted};
  if (const DecoderStatus status = TokenPlaces::check(args); status != kDone) return status;
  if (!wanted.are_below(args.num_tokens)) return kNoSuchChunk;
  if (!embedded.are_below(model.num_embeddings)) return kNoSuchToken;
  const int features = model.head.k;
  static thread_local Scratch workspace;
  workspace.reset();
  const DecoderStepArgs step = TokenPlaces(args, model.layers[0]->block_size, workspace).for_layers();
  const auto take_rows = [&](int count) { return workspace.take<uint16_t>(size_t(count) * size_t(features)); };
  uint16_t *hidden = take_rows(step.num_tokens), *normed = take_rows(wanted.count);
  embedded.gather(static_cast<const uint16_t *>(model.embedding), features, hidden);

  // A token may be wanted twice: only where fewer rows are left is the last layer finished for the wanted ones alone.
  const bool is_finished_whole = wanted.count >= step.num_tokens;
  const int num_whole = is_finished_whole ? model.num_layers : model.num_layers - 1;
  const LinearArgs *after = is_finished_whole ? &model.head : &model.layers[num_whole]->qkv;
  run_decoder_layers(kernels, model.layers, num_whole, after, hidden, step);
  const uint16_t *last = hidden;
  if (!is_finished_whole) {
    last = LayerRun(kernels, *model.layers[num_whole], &model.head, step, hidden).run_for(wanted);
  } else if (!wanted.is_all_of(step.num_tokens)) {
    uint16_t *const gathered = take_rows(wanted.count);
    wanted.gather(hidden, features, gathered), last = gathered;
  }
  if (wanted.count == 0) return kDone;
  kernels.rms_norm({last, nullptr, model.norm, normed, nullptr, features, 0, wanted.count, features, kBFloat16,
                    model.norm_dtype, model.eps, step.num_threads});
  LinearArgs head = model.head;
  head.x = normed, head.x_stride = features, head.out = args.logits, head.out_dtype = kFloat32;
  head.m = wanted.count, head.num_threads = step.num_threads;
  kernels.linear(head);
  return kDone;
}
