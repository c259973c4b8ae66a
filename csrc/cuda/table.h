// Copies tables to the device: as arguments of launches, since a copy from pageable memory may wait for the device.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "cuda/launch.h"
#include "cuda/table.cuh"

namespace gradzip::cuda {

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
    launch(stream, grid_of(1), kBlock, upload_kernel, batch, int(count), reinterpret_cast<uint64_t*>(at) + first);
  }
  return at;
}

}  // namespace gradzip::cuda
