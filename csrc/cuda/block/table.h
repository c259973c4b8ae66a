// Copies tables to the device: as arguments of launches, since a copy from pageable memory may wait for the device.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "cuda/block/launch.h"
#include "cuda/block/table.cuh"

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

// f(batch, number of its entries) for all entries, in order.
template <int kMost = kMostVectors, class Entry, class F>
void for_each_batch(const std::vector<Entry>& entries, F f) {
  for (size_t first = 0; first < entries.size(); first += kMost) {
    Batch<Entry, kMost> batch{};
    const size_t some = std::min(entries.size() - first, size_t(kMost));
    std::copy_n(entries.begin() + first, some, batch.of);
    f(batch, unsigned(some));
  }
}

// Launches a decoder on weighted sums: function(entries, count, terms, more...), with a block for each `tile` elements.
template <class Term, class... P, class... A>
int64_t launch_sums(void* workspace, const WeightedSum* table, int64_t count, const Term* terms, int64_t tile,
                    cudaStream_t stream, Kernel<P...> function, A... more) {
  std::vector<WeightedSumEntry> entries;
  int64_t first_term = 0, blocks = 0;
  for (int64_t i = 0; i < count; ++i) {
    entries.push_back({table[i], first_term, blocks});
    first_term += table[i].terms;
    blocks += ceil_div(table[i].n, tile);
  }
  // In one table: as a rule, one upload for both.
  std::vector<uint64_t> words(reinterpret_cast<const uint64_t*>(entries.data()),
                              reinterpret_cast<const uint64_t*>(entries.data() + count));
  const size_t of_entries = words.size();
  words.insert(words.end(), reinterpret_cast<const uint64_t*>(terms),
               reinterpret_cast<const uint64_t*>(terms + first_term));
  Arena arena(workspace);
  const uint64_t* on_device = upload(arena, words, stream);
  if (!workspace) return arena.nbytes();
  if (blocks > 0)
    launch(stream, grid_of(unsigned(blocks)), kBlock, function, reinterpret_cast<const WeightedSumEntry*>(on_device),
           count, reinterpret_cast<const Term*>(on_device + of_entries), more...);
  return 0;
}

}  // namespace
}  // namespace gradzip::cuda
