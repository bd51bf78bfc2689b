// Writing keys and values into their slots. Included once per level, inside that level's namespace.

// Symmetric int8 with one scale per token and head; returns the scale. An all-zero row has scale 0.
template <typename T> static inline float quantize_row(const T *from, int dim, int8_t *to) {
  Vec largest = zero();
  for (int d = 0; d < dim; d += kLanes) {
    const Vec value = load_as(from + d, std::min(kLanes, dim - d));
    largest = max(largest, max(value, zero() - value));
  }
  const float scale = reduce_max(largest) / 127.0f;
  const Vec divisor = splat(scale > 0 ? scale : 1.0f);
  for (int d = 0; d < dim; d += kLanes) {
    const int n = std::min(kLanes, dim - d);
    store_int8(to + d, round_even(load_as(from + d, n) / divisor), n);
  }
  return scale;
}

template <typename T> static void store_token(const StoreArgs &args, int token) {
  const int64_t slot = args.slots[token];
  if (slot < 0) return;
  const int64_t block = slot / args.block_size, offset = slot % args.block_size;
  for (int head = 0; head < args.num_kv_heads; ++head) {
    const int64_t row = (block * args.num_kv_heads + head) * args.block_size + offset;
    const T *k = static_cast<const T *>(args.k) + token * args.k_stride_t + head * args.k_stride_h;
    const T *v = static_cast<const T *>(args.v) + token * args.v_stride_t + head * args.v_stride_h;
    if (args.kv_dtype == kInt8) {
      args.k_scales[row] = quantize_row(k, args.head_dim_k, static_cast<int8_t *>(args.k_cache) + row * args.head_dim_k);
      args.v_scales[row] = quantize_row(v, args.head_dim_v, static_cast<int8_t *>(args.v_cache) + row * args.head_dim_v);
      continue;
    }
    std::memcpy(static_cast<T *>(args.k_cache) + row * args.head_dim_k, k, sizeof(T) * size_t(args.head_dim_k));
    std::memcpy(static_cast<T *>(args.v_cache) + row * args.head_dim_v, v, sizeof(T) * size_t(args.head_dim_v));
  }
}

using StoreToken = void (*)(const StoreArgs &, int);
static StoreToken store_of(const StoreArgs &args) {
  return args.dtype == kFloat32 ? store_token<float> : store_token<uint16_t>;
}

static void store_kv(const StoreArgs &args) {
  const StoreToken store = store_of(args);
#pragma omp parallel for num_threads(args.num_threads) schedule(static) if (args.num_tokens > 16)
  for (int token = 0; token < args.num_tokens; ++token) store(args, token);
}
