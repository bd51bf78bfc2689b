// Normalisation, rotation and gating, each token by itself. Included once per level, inside that level's namespace.

// Below this many elements a second thread costs more than it brings.
constexpr int64_t kThreadedElements = 16384;

template <typename T> static inline const T *row_of(const void *base, int64_t stride, int64_t row) {
  return static_cast<const T *>(base) + row * stride;
}

// out = h / sqrt(mean(h^2) + eps) * weight with h = x, or x + residual rounded to T. Squares are summed in four streams
// of vectors, so the order depends on the number of features alone.
template <typename T, typename W> static void normalise_token(const RmsNormArgs &args, int64_t token) {
  const int size = args.num_features;
  const T *h = row_of<T>(args.x, args.x_stride, token);
  if (args.residual) {
    const T *residual = row_of<T>(args.residual, args.residual_stride, token);
    T *hidden = static_cast<T *>(args.hidden) + token * size;
    for (int i = 0; i < size; i += kLanes) {
      const int n = std::min(kLanes, size - i);
      store_as(hidden + i, load_as(h + i, n) + load_as(residual + i, n), n);
    }
    h = hidden;
  }
  Vec sums[4] = {zero(), zero(), zero(), zero()};
  for (int i = 0, stream = 0; i < size; i += kLanes, stream = (stream + 1) % 4) {
    const Vec value = load_as(h + i, std::min(kLanes, size - i));
    sums[stream] = fma(value, value, sums[stream]);
  }
  const float mean = reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3])) / float(size);
  const Vec inverse = splat(1.0f / __builtin_sqrtf(mean + args.eps));
  const W *weight = static_cast<const W *>(args.weight);
  T *out = static_cast<T *>(args.out) + token * size;
  for (int i = 0; i < size; i += kLanes) {
    const int n = std::min(kLanes, size - i);
    store_as(out + i, load_as(h + i, n) * inverse * load_as(weight + i, n), n);
  }
}

static inline Vec silu(Vec gate) {
  // exp of what is never positive cannot overflow.
  const Mask positive = greater(gate, zero());
  const Vec decay = exp(select(positive, zero() - gate, gate));
  return gate * (select(positive, splat(1.0f), decay) * reciprocal(splat(1.0f) + decay));
}

template <typename T> static void gate_token(const SiluMulArgs &args, int64_t token) {
  const int size = args.num_inner;
  const T *gate = row_of<T>(args.gate_up, args.stride, token), *up = gate + size;
  T *out = static_cast<T *>(args.out) + token * size;
  for (int i = 0; i < size; i += kLanes) {
    const int n = std::min(kLanes, size - i);
    store_as(out + i, silu(load_as(gate + i, n)) * load_as(up + i, n), n);
  }
}

template <typename T, typename A> static void rotate_token(const RotaryArgs &args, int64_t token) {
  const int half = args.rotated / 2;
  const int64_t row = args.positions ? args.positions[token] : token;
  const A *cos = row_of<A>(args.cos, args.cos_stride, row), *sin = row_of<A>(args.sin, args.sin_stride, row);
  for (int head = 0; head < args.num_heads; ++head) {
    const T *x = row_of<T>(args.x, args.x_stride_t, token) + head * args.x_stride_h;
    T *out = static_cast<T *>(args.out) + token * args.out_stride_t + head * args.out_stride_h;
    for (int i = 0; i < half; i += kLanes) {
      const int n = std::min(kLanes, half - i);
      const Vec a = load_as(x + i, n), b = load_as(x + half + i, n);
      store_as(out + i, a * load_as(cos + i, n) - b * load_as(sin + i, n), n);
      store_as(out + half + i, b * load_as(cos + half + i, n) + a * load_as(sin + half + i, n), n);
    }
    if (out != x) std::memcpy(out + args.rotated, x + args.rotated, sizeof(T) * size_t(args.head_dim - args.rotated));
  }
}

template <typename Args>
static void for_each_token(const Args &args, int64_t elements, void (*one)(const Args &, int64_t)) {
  const int64_t num_tokens = args.num_tokens;
#pragma omp parallel for num_threads(args.num_threads) schedule(static) if (elements > kThreadedElements)
  for (int64_t token = 0; token < num_tokens; ++token) one(args, token);
}

static void rms_norm(const RmsNormArgs &args) {
  const int64_t elements = int64_t(args.num_tokens) * args.num_features;
  if (args.dtype == kFloat32)
    for_each_token(args, elements, args.weight_dtype == kFloat32 ? normalise_token<float, float> : normalise_token<float, uint16_t>);
  else
    for_each_token(args, elements,
                   args.weight_dtype == kFloat32 ? normalise_token<uint16_t, float> : normalise_token<uint16_t, uint16_t>);
}

static void silu_mul(const SiluMulArgs &args) {
  const int64_t elements = int64_t(args.num_tokens) * args.num_inner;
  for_each_token(args, elements, args.dtype == kFloat32 ? gate_token<float> : gate_token<uint16_t>);
}

using RotateToken = void (*)(const RotaryArgs &, int64_t);
static RotateToken rotation_of(const RotaryArgs &args) {
  if (args.dtype == kFloat32) return args.angle_dtype == kFloat32 ? rotate_token<float, float> : rotate_token<float, uint16_t>;
  return args.angle_dtype == kFloat32 ? rotate_token<uint16_t, float> : rotate_token<uint16_t, uint16_t>;
}

static int64_t rotated_elements(const RotaryArgs &args) {
  return int64_t(args.num_tokens) * args.num_heads * args.head_dim;
}

static void rotary(const RotaryArgs &args) { for_each_token(args, rotated_elements(args), rotation_of(args)); }

// What lies in the cache afterwards is rotated: the keys to store are among the heads, in place.
static void rotate_and_store(const RotaryArgs &rotation, const StoreArgs &storing) {
  const RotateToken rotate = rotation_of(rotation);
  const StoreToken store = store_of(storing);
#pragma omp parallel for num_threads(rotation.num_threads) schedule(static) if (rotated_elements(rotation) > kThreadedElements)
  for (int token = 0; token < rotation.num_tokens; ++token) rotate(rotation, token), store(storing, token);
}
