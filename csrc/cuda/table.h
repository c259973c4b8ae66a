// Copies tables to the device: as arguments of launches, since a copy from pageable memory may wait for the device.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "cuda/launch.h"
#include "cuda/table.cuh"

namespace gradzip::cuda {
namespace {

// A copy of the table in the workspace. Queues nothing if there is no workspace yet.
template <class T>
T* upload(Arena& arena, const std::vector<T>& table, cudaStream_t stream) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(uint64_t) == 0);
  T* at = arena.take<T>(int64_t(table.size()));
  if (!at) return nullptr;
  const size_t words = table.size() * (sizeof(T) / sizeof(uint64_t));
  for (size_t first = 0; first < words; first += kUploadWords) {
    UploadBatch batch{};
    const size_t count = std::min(words - first, size_t(kUploadWords));
    std::memcpy(batch.words, reinterpret_cast<const uint64_t*>(table.data()) + first, count * sizeof(uint64_t));
    launch(stream, grid_of(1), kBlock, kernel<upload_kernel>, batch, int(count),
           reinterpret_cast<uint64_t*>(at) + first);
  }
  return at;
}

// Sums of terms in the workspace: entries {sum, index of its first term, its first block}, and the terms of all sums.
template <class Entry, class Sum, class Term>
struct UploadedSums {
  const Entry* entries;
  const Term* terms;
  int64_t blocks = 0;  // each of `tile` elements

  UploadedSums(Arena& arena, const Sum* table, int64_t count, const Term* of_sums, int64_t tile, cudaStream_t stream) {
    std::vector<Entry> listed;
    int64_t before = 0;
    for (int64_t i = 0; i < count; ++i) {
      listed.push_back({table[i], before, blocks});
      before += table[i].terms;
      blocks += ceil_div(table[i].n, tile);
    }
    entries = upload(arena, listed, stream);
    terms = upload(arena, std::vector<Term>(of_sums, of_sums + before), stream);
  }
};

}  // namespace
}  // namespace gradzip::cuda
