// Launches kernels on rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/block/rows.cuh"

namespace gradzip::cuda {

// f(first, count, keys) for each `count` <= kKeysBatch rows, from row `first` on. Without keys, they are 0.
template <class F>
void for_rows(int64_t rows, const uint64_t* keys, F&& f) {
  for (int64_t first = 0; first < rows; first += kKeysBatch) {
    Keys batch{};
    const int64_t count = std::min<int64_t>(rows - first, kKeysBatch);
    if (keys) std::copy_n(keys + first, count, batch.of);
    f(first, unsigned(count), batch);
  }
}

}  // namespace gradzip::cuda
