// Where a bitmap's bits are set, and the values there, in one walk.
#pragma once

#include "cuda/bitmap.cuh"

namespace gradzip::cuda {

__global__ void __launch_bounds__(kBlock)
    marked_indices_kernel(const uint8_t* bitmap, int64_t n, const float* x, const int64_t* offsets, int64_t count,
                          int32_t* indices, float* values) {
  if (offsets[(n + kTile - 1) / kTile] != count) return;
  for_each_bit<true>(
      bitmap, n, offsets, [&](int64_t i, bool, int64_t) { return x ? __ldg(x + i) : 0.0f; },
      [&](int64_t i, int64_t rank, float value) {
        indices[rank] = int32_t(i);
        if (x) values[rank] = value;
      });
}

}  // namespace gradzip::cuda
