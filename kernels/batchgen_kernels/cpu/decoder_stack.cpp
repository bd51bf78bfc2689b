// The decoder layers of a model of the llama kind in one call: only the order of the kernels stands here, so each of its
// results has the bits that the kernels give when they are called one by one.
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

class LayerRun {
 public:
  LayerRun(const KernelTable &kernels, const DecoderLayerArgs &layer, const DecoderStepArgs &step)
      : kernels_(kernels), layer_(layer), step_(step), stream_(static_cast<uint16_t *>(step.hidden)),
        features_(layer.qkv.k), queries_(layer.num_heads * layer.head_dim), keys_(layer.num_kv_heads * layer.head_dim) {
    static thread_local Scratch workspace;
    workspace.reset();
    const auto rows = [&](int width) { return workspace.take<uint16_t>(size_t(step.num_tokens) * size_t(width)); };
    normed_ = rows(features_), qkv_ = rows(layer.qkv.n), attended_ = rows(queries_), gated_ = rows(layer.gate_up.gated);
  }

  void run() {
    normalise(layer_.attention_norm, layer_.attention_eps);
    multiply(layer_.qkv, normed_, features_, qkv_);
    rotate_and_store();
    attend();
    add_product(layer_.attention_out, attended_, queries_);
    normalise(layer_.mlp_norm, layer_.mlp_eps);
    multiply(layer_.gate_up, normed_, features_, gated_);
    add_product(layer_.down, gated_, layer_.gate_up.gated);
  }

 private:
  void normalise(const void *weight, float eps) {
    kernels_.rms_norm({stream_, nullptr, weight, normed_, nullptr, features_, 0, step_.num_tokens, features_, kBFloat16,
                       layer_.norm_dtype, eps, step_.num_threads});
  }

  void add_product(LinearArgs product, const void *x, int width) {
    product.residual = stream_;
    multiply(product, x, width, stream_);
  }

  void multiply(LinearArgs product, const void *x, int width, void *out) {
    product.x = x, product.x_stride = width, product.out = out, product.out_dtype = kBFloat16;
    product.m = step_.num_tokens, product.num_threads = step_.num_threads;
    kernels_.linear(product);
  }

  // Heads of queries, keys and values lie side by side; the former two are rotated in place.
  void rotate_and_store() {
    const int64_t stride = layer_.qkv.n;
    const uint16_t *k = qkv_ + queries_;
    kernels_.rotate_and_store(
        {qkv_, step_.cos, step_.sin, qkv_, stride, layer_.head_dim, stride, layer_.head_dim, step_.rotated, step_.rotated,
         step_.num_tokens, layer_.num_heads + layer_.num_kv_heads, layer_.head_dim, step_.rotated, kBFloat16,
         step_.angle_dtype, step_.num_threads},
        {k, k + keys_, layer_.k_cache, layer_.v_cache, layer_.k_scales, layer_.v_scales, step_.slots, stride,
         layer_.head_dim, stride, layer_.head_dim, step_.num_tokens, layer_.num_kv_heads, layer_.head_dim,
         layer_.head_dim, layer_.block_size, kBFloat16, layer_.kv_dtype, step_.num_threads});
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
  const DecoderStepArgs &step_;
  uint16_t *const stream_;
  const int features_, queries_, keys_;
  uint16_t *normed_, *qkv_, *attended_, *gated_;
};

}  // namespace

void run_decoder_layers(const KernelTable &kernels, const DecoderLayerArgs *const *layers, int num_layers,
                        const DecoderStepArgs &step) {
  for (int i = 0; i < num_layers; ++i) LayerRun(kernels, *layers[i], step).run();
}
