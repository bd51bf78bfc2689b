// Tile instructions with the memory clobbers that the compiler's own wrappers lack.
// Included once, inside the AMX level's namespace.

static inline void tile_configure(const void *shape) { asm volatile("ldtilecfg (%0)" ::"r"(shape) : "memory"); }
static inline void tile_release() { asm volatile("tilerelease" ::: "memory"); }
// The operand of ldtilecfg.
struct TileShape {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

template <int T> static inline void tile_zero() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
template <int T> static inline void tile_load(const void *from, size_t stride_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride_bytes), "i"(T) : "memory");
}
// The same for what is read once: it does not drive the other operand out of the first cache.
template <int T> static inline void tile_stream(const void *from, size_t stride_bytes) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride_bytes), "i"(T) : "memory");
}
template <int T> static inline void tile_store(void *to, size_t stride_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride_bytes), "i"(T) : "memory");
}
// C[16, 16] += A[16, 32] B[32, 16], B as pairs.
template <int C, int A, int B> static inline void tile_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
// The same on int32, A[16, 64] unsigned, B[64, 16] as quads.
template <int C, int A, int B> static inline void tile_dot_int8() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
// The same with both signed.
template <int C, int A, int B> static inline void tile_dot_signed() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
