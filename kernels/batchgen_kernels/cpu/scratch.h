// A thread's working memory, kept between calls.
//
// Everything but the shortest path lies in scratch.cpp: a header's vague-linkage code, compiled in a file for a newer
// processor, could be the copy that the linker keeps for all.
#pragma once

#include <cstddef>

class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch &) = delete;
  ~Scratch();

  // Memory from take() is valid until the next reset(), and aligned to a cache line.
  void reset();
  template <typename T> __attribute__((always_inline)) T *take(size_t count) {
    return static_cast<T *>(take_bytes(count * sizeof(T)));
  }

 private:
  struct Chunk;
  void *take_bytes(size_t bytes);
  void add_chunk(size_t bytes);
  void release();

  Chunk *newest_ = nullptr;
  size_t used_ = 0;
};

// The calling thread's own.
Scratch &thread_scratch();
// The calling thread's own, for what it shares with the threads it starts; valid until its next call.
Scratch &shared_scratch();
