// Tables with an entry for each tensor, and the blocks that work on it.
#pragma once

#include "common/weighted_sum.h"
#include "cuda/block/block.cuh"

namespace gradzip::cuda {

// What one launch takes to the device as its argument, which may have 4 KB.
constexpr int kUploadWords = 496;
struct UploadBatch {
  uint64_t words[kUploadWords];
};
static_assert(sizeof(UploadBatch) < 4000, "it fits the 4 KB that a kernel may have");

[[maybe_unused]] static __global__ void __launch_bounds__(kBlock)
    upload_kernel(UploadBatch batch, int count, uint64_t* to) {
  for (int i = int(threadIdx.x); i < count; i += kBlock) to[i] = batch.words[i];
}

// What one launch takes as its argument: blocks with the same y work on one entry.
constexpr int kMostVectors = 16;
template <class Entry, int kMost = kMostVectors>
struct Batch {
  static_assert(kMost * sizeof(Entry) < 4000, "it fits the 4 KB that a kernel may have");
  Entry of[kMost];
};

// This block's entry in shared memory, to save registers.
template <class Entry, int kMost>
GZ_DEVICE const Entry& shared_entry(const Batch<Entry, kMost>& batch) {
  __shared__ Entry entry;
  if (threadIdx.x == 0) entry = batch.of[blockIdx.y];
  __syncthreads();
  return entry;
}

// A sum, the index of its first term, and its first block.
struct WeightedSumEntry {
  WeightedSum sum;
  int64_t first_term, first_block;
};

// The index of the entry that this block works on: entries are in the order of their first blocks.
template <class Entry>
GZ_DEVICE int64_t entry_of_block(const Entry* entries, int64_t count) {
  int64_t first = 0, end = count;
  while (end - first > 1) {
    const int64_t middle = (first + end) / 2;
    (entries[middle].first_block <= int64_t(blockIdx.x) ? first : end) = middle;
  }
  return first;
}

// The same of a table that is an argument of the launch: short, and searched with fewer registers.
template <class Table>
GZ_DEVICE int entry_of_block(const Table& table) {
  int index = 0;
  while (index + 1 < table.count && table.entries[index + 1].first_block <= blockIdx.x) ++index;
  return index;
}

}  // namespace gradzip::cuda
