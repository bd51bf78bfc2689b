// Chooses the processor level and exports the C interface. Compiled for the plainest processor.

#include <atomic>
#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "api.h"
#include "attention_plan.h"

#define DECLARE_LEVEL(name) \
  namespace level_##name {  \
  extern const KernelTable kTable; \
  }
DECLARE_LEVEL(portable)
#if defined(__x86_64__)
DECLARE_LEVEL(avx2)
DECLARE_LEVEL(avx512)
DECLARE_LEVEL(avx512_bf16)
DECLARE_LEVEL(amx)
#endif

namespace {

#if defined(__x86_64__)

const KernelTable *const kLevels[] = {&level_portable::kTable, &level_avx2::kTable, &level_avx512::kTable,
                                      &level_avx512_bf16::kTable, &level_amx::kTable};

// Linux grants the tile registers to a process that asks once.
bool request_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

uint64_t saved_state_components() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t(high) << 32 | low;
}

// The highest level that processor and operating system support.
int detect_level() {
  uint32_t a, b, c, d, a1, b1, c1, d1;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 0;
  const bool fma = c & bit_FMA, f16c = c & bit_F16C;
  const uint64_t state = saved_state_components();
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !__get_cpuid_count(7, 1, &a1, &b1, &c1, &d1)) return 0;
  if (!(b & bit_AVX2) || !fma || !f16c || (state & 0x6) != 0x6) return 0;
  constexpr uint32_t kAvx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
  if ((b & kAvx512) != kAvx512 || !(c & 1u << 11) || (state & 0xe0) != 0xe0) return 1;  // c: VNNI
  if (!(a1 & 1u << 5)) return 2;                                                        // AVX512_BF16
  constexpr uint32_t kAmx = 1u << 22 | 1u << 24 | 1u << 25;                             // BF16, TILE, INT8
  constexpr uint32_t kVbmi = 1u << 1;
  if ((d & kAmx) != kAmx || !(c & kVbmi) || (state & 0x60000) != 0x60000 || !request_tiles()) return 3;
  return 4;
}

#else

const KernelTable *const kLevels[] = {&level_portable::kTable};
int detect_level() { return 0; }

#endif

const int kHighestLevel = detect_level();
std::atomic<int> current_level{kHighestLevel};

const KernelTable &table() { return *kLevels[current_level.load(std::memory_order_relaxed)]; }

}  // namespace

// Asks for huge pages under the whole ones that lie in [at, at + bytes); advice only, so a refusal is no error.
BG_EXPORT void bg_advise_huge_pages(void *at, int64_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kHugePage = uintptr_t(2) << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(at) + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(at) + uintptr_t(bytes)) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void *>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)at, (void)bytes;
#endif
}

// Bumped with every change of this interface: the binding refuses a library of another version.
BG_EXPORT int bg_interface_version() { return 14; }
BG_EXPORT int bg_highest_level() { return kHighestLevel; }
BG_EXPORT const char *bg_level_name(int level) { return kLevels[level]->name; }
BG_EXPORT int bg_current_level() { return current_level; }
BG_EXPORT void bg_set_level(int level) { current_level = level; }

BG_EXPORT void bg_paged_attention(const AttentionArgs *args) { table().attention(*args, plan_attention(*args)); }
BG_EXPORT void bg_store_kv(const StoreArgs *args) { table().store_kv(*args); }

BG_EXPORT void bg_linear(const LinearArgs *args) { table().linear(*args); }
BG_EXPORT void bg_sample(const SampleArgs *args) { table().sample(*args); }
BG_EXPORT void bg_top_tokens(const TopTokensArgs *args) { table().top_tokens(*args); }
BG_EXPORT void bg_token_ranks(const TokenRanksArgs *args) { table().token_ranks(*args); }
BG_EXPORT void bg_rms_norm(const RmsNormArgs *args) { table().rms_norm(*args); }
BG_EXPORT void bg_silu_mul(const SiluMulArgs *args) { table().silu_mul(*args); }
BG_EXPORT void bg_rotary(const RotaryArgs *args) { table().rotary(*args); }
BG_EXPORT void bg_decoder_layers(const DecoderLayerArgs *const *layers, int num_layers, void *hidden,
                                 const DecoderStepArgs *step) {
  run_decoder_layers(table(), layers, num_layers, nullptr, hidden, *step);
}
BG_EXPORT int bg_decoder_model(const DecoderModelArgs *model, const DecoderModelStepArgs *step) {
  return run_decoder_model(table(), *model, *step);
}

// Copies block src over block dst in each cache, in order; pairs is [num_pairs, 2].
BG_EXPORT void bg_copy_blocks(void *const *caches, const int64_t *block_bytes, int num_caches, const int64_t *pairs,
                              int num_pairs, int num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(static) if (num_caches > 1)
  for (int i = 0; i < num_caches; ++i)
    for (int p = 0; p < num_pairs; ++p)
      std::memcpy(static_cast<char *>(caches[i]) + pairs[2 * p + 1] * block_bytes[i],
                  static_cast<char *>(caches[i]) + pairs[2 * p] * block_bytes[i], size_t(block_bytes[i]));
}
