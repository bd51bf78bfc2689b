#include "scratch.h"

#include <algorithm>
#include <cstdlib>

namespace {
constexpr size_t kAlign = 64, kFirstChunk = size_t(256) << 10;
size_t round_up(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }
}  // namespace

struct alignas(kAlign) Scratch::Chunk {
  Chunk *older;
  size_t size;
};

Scratch::~Scratch() { release(); }

void Scratch::release() {
  while (newest_) {
    Chunk *older = newest_->older;
    std::free(newest_);
    newest_ = older;
  }
}

void Scratch::reset() {
  if (newest_ && newest_->older) {  // next time one chunk is enough
    size_t total = 0;
    for (const Chunk *chunk = newest_; chunk; chunk = chunk->older) total += chunk->size;
    release();
    add_chunk(total);
  }
  used_ = 0;
}

void *Scratch::take_bytes(size_t bytes) {
  bytes = round_up(bytes);
  if (!newest_ || used_ + bytes > newest_->size) {
    add_chunk(std::max(bytes, kFirstChunk));
    used_ = 0;
  }
  char *at = reinterpret_cast<char *>(newest_ + 1) + used_;
  used_ += bytes;
  return at;
}

void Scratch::add_chunk(size_t bytes) {
  auto *chunk = static_cast<Chunk *>(std::aligned_alloc(kAlign, sizeof(Chunk) + round_up(bytes)));
  if (!chunk) std::abort();
  chunk->older = newest_, chunk->size = round_up(bytes);
  newest_ = chunk;
}

Scratch &thread_scratch() {
  static thread_local Scratch scratch;
  return scratch;
}

Scratch &shared_scratch() {
  static thread_local Scratch scratch;
  return scratch;
}
