// Prefix-sum packing (HPDC'20, section 3.2): items whose bit is set are moved to the offset given by the prefix sum of
// the bitmap. Tiles are counted first, which reads the bitmap a second time: 1/32 of the size of the items.
#pragma once

#include "cuda/block/bitmap_tiles.cuh"

namespace gradzip::cuda {

template <class T>
__global__ void __launch_bounds__(kBlock)
    compact_kernel(const T* x, int64_t n, const uint8_t* bitmap, const int64_t* offsets, T* out, int64_t capacity) {
  if (offsets[(n + kTile - 1) / kTile] > capacity) return;
  for_each_bit<true>(
      bitmap, n, offsets, [&](int64_t i, bool, int64_t) { return __ldg(x + i); },
      [&](int64_t, int64_t rank, T value) { out[rank] = value; });
}

template <class T>
__global__ void __launch_bounds__(kBlock)
    expand_kernel(const T* values, int64_t count, const uint8_t* bitmap, const int64_t* offsets, T* out, int64_t n) {
  if (offsets[(n + kTile - 1) / kTile] != count) return;
  for_each_bit<false>(
      bitmap, n, offsets, [&](int64_t, bool set, int64_t rank) { return set ? __ldg(values + rank) : T(0); },
      [&](int64_t i, int64_t, T value) { out[i] = value; });
}

}  // namespace gradzip::cuda
