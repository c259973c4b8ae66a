#pragma once

#include "common/restore.h"
#include "cuda/block/block.cuh"
#include "cuda/block/table.cuh"

namespace gradzip::cuda {

constexpr int kRestoreBatch = 96;  // entries whose table fits the 4 KB of kernel arguments

// `blocks` blocks work on an entry.
struct RestoreEntry {
  Restoration restoration;
  uint32_t first_block, blocks;
};
struct RestoreTable {
  int32_t count;
  RestoreEntry entries[kRestoreBatch];
};
static_assert(sizeof(RestoreTable) < 4000, "it fits the 4 KB that a kernel may have");

// As a rule the number is finite, and this is all that a block does: its entry is looked up later.
__global__ void __launch_bounds__(kBlock) restore_kernel(const float* number, RestoreTable table) {
  if (!restores(__ldg(number))) return;
  const auto [restoration, first_block, blocks] = table.entries[entry_of_block(table)];
  const auto [target, source, nbytes, pattern] = restoration;
  const int64_t thread = int64_t(blockIdx.x - first_block) * kBlock + threadIdx.x, threads = int64_t(blocks) * kBlock;
  auto* to = static_cast<uint8_t*>(target);
  const auto* from = static_cast<const uint8_t*>(source);
  const bool aligned = (reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % 16 == 0;
  const int64_t words = aligned ? nbytes / 16 : 0;
  for (int64_t i = thread; i < words; i += threads) {
    ulonglong2 word;
    if (from)
      word = __ldg(reinterpret_cast<const ulonglong2*>(from) + i);
    else
      word.x = word.y = pattern;
    reinterpret_cast<ulonglong2*>(to)[i] = word;
  }
  for (int64_t i = 16 * words + thread; i < nbytes; i += threads) to[i] = from ? from[i] : pattern_byte(pattern, i);
}

}  // namespace gradzip::cuda
