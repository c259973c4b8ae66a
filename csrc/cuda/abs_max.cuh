#pragma once

#include "cuda/block/block.cuh"
#include "cuda/block/quads.cuh"
#include "cuda/block/table.cuh"

namespace gradzip::cuda {

// *most = the bits of max |x|, which order as magnitudes do, with every NaN above infinity. *most is 0 at launch.
template <class T>
__global__ void __launch_bounds__(kBlock) abs_max_kernel(const T* x, int64_t n, uint32_t* most) {
  uint32_t largest = 0;
  const auto see = [&](float value) {
    const uint32_t m = magnitude(value);
    largest = largest > m ? largest : m;
  };
  if constexpr (sizeof(T) == 4)
    for_each(x, n, see);
  else
    for_each_half(x, n, grid_thread(), grid_threads(), see);
  largest = warp_max(largest);
  if (lane() == 0 && largest > 0) atomicMax(most, largest);
}

constexpr int kColumnsBatch = 64;  // matrices whose table fits the 4 KB of kernel arguments

// A matrix of n elements: most[c] is 0 at launch, and then that of column c. `blocks` blocks work on it.
struct ColumnsEntry {
  const void* x;
  int64_t n, columns;
  uint32_t* most;
  uint32_t first_block, blocks;
};
struct ColumnsTable {
  int32_t count, dtype;  // of one column, unless they are float32
  ColumnsEntry entries[kColumnsBatch];
};
static_assert(sizeof(ColumnsTable) < 4000, "it fits the 4 KB that a kernel may have");

__global__ void __launch_bounds__(kBlock) abs_max_columns_kernel(ColumnsTable table) {
  const ColumnsEntry& entry = table.entries[entry_of_block(table)];
  const int64_t n = entry.n, columns = entry.columns;
  uint32_t* most = entry.most;
  const int64_t thread = int64_t(blockIdx.x - entry.first_block) * kBlock + threadIdx.x;
  const int64_t threads = int64_t(entry.blocks) * kBlock;
  uint32_t largest = 0;
  if (columns == 1) {
    const auto see = [&](float value) {
      const uint32_t m = magnitude(value);
      largest = largest > m ? largest : m;
    };
    typed_in(entry.x, table.dtype, [&](auto* x) {
      if constexpr (sizeof(*x) == 4)
        for_each(x, n, thread, threads, see);
      else
        for_each_half(x, n, thread, threads, see);
    });
    largest = warp_max(largest);
    if (lane() == 0 && largest > 0) atomicMax(most, largest);
    return;
  }
  const auto* x = static_cast<const float*>(entry.x);
  const int64_t stride = threads / columns * columns;  // whole rows: each thread stays in its column
  if (stride == 0) {
    for (int64_t i = thread; i < n; i += threads) atomicMax(most + i % columns, magnitude(x[i]));
    return;
  }
  if (thread >= stride) return;
  for (int64_t i = thread; i < n; i += stride) {
    const uint32_t m = magnitude(x[i]);
    largest = largest > m ? largest : m;
  }
  if (largest > 0) atomicMax(most + thread % columns, largest);
}

}  // namespace gradzip::cuda
