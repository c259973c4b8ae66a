// Status bitmaps: which elements a selection keeps, how many there are, and where.
#pragma once

#include "common/selection.h"
#include "cuda/block/bitmap_tiles.cuh"

namespace gradzip::cuda {

// The bits of 32 values per lane: which are at least the threshold, and which equal it.
struct Marks {
  uint32_t reach, equal;
};

GZ_DEVICE Marks mark_words(const float* x, int64_t first, int64_t n, uint32_t threshold) {
  Marks marks{0, 0};
  for (int j = 0; j < kLanes; j += 8) {
    float value[8];
#pragma unroll
    for (int u = 0; u < 8; ++u) {
      const int64_t i = first + 32 * (j + u) + lane();
      value[u] = i < n ? __ldg(x + i) : 0.0f;
    }
#pragma unroll
    for (int u = 0; u < 8; ++u) {
      const bool inside = first + 32 * (j + u) + lane() < n;
      const uint32_t m = magnitude(value[u]);
      const unsigned reach = __ballot_sync(kAllLanes, inside && m >= threshold);
      const unsigned equal = __ballot_sync(kAllLanes, inside && m == threshold);
      if (lane() == j + u) marks = {reach, equal};
    }
  }
  return marks;
}

GZ_DEVICE uint32_t threshold_of(const Selection* selection) {
  return magnitude(selection->threshold);  // -0 is 0
}

// Writes the bitmap with all ties set, the number of ties of each tile, and *set, 0 at launch, the number of bits set.
__global__ void __launch_bounds__(kBlock) mark_kernel(const float* x, int64_t n, const Selection* selection,
                                                      uint8_t* bitmap, uint32_t* equals, int64_t* set) {
  __shared__ uint32_t partial[kLanes];
  const uint32_t threshold = threshold_of(selection);
  int64_t total = 0;
  for (int64_t tile = blockIdx.x; tile * kTile < n; tile += gridDim.x) {
    const Marks marks = mark_words(x, tile * kTile + warp() * kWarpBits, n, threshold);
    store_word(bitmap, tile_word(tile), n, marks.reach);
    // Both fit 16 bits.
    const uint32_t sums = block_sum(uint32_t(__popc(marks.reach)) | uint32_t(__popc(marks.equal)) << 16, partial);
    if (threadIdx.x == 0) equals[tile] = sums >> 16;
    total += sums & 0xffff;
  }
  if (threadIdx.x == 0 && total > 0) atomic_add(set, total);
}
static_assert(kTile < 1 << 16, "two counts in a word");

// Clears the bits of all but the first `ties` values equal to the threshold. Reads only tiles with surplus ties.
__global__ void __launch_bounds__(kBlock)
    drop_ties_kernel(const float* x, int64_t n, const Selection* selection, const uint32_t* equals,
                     const int64_t* offsets, uint8_t* bitmap, int64_t* set) {
  __shared__ int32_t partial[kLanes];
  const uint32_t threshold = threshold_of(selection);
  for (int64_t tile = blockIdx.x; tile * kTile < n; tile += gridDim.x) {
    const int64_t left = selection->ties - offsets[tile], keep = left > 0 ? left : 0;
    const int64_t surplus = int64_t(equals[tile]) - keep;
    if (surplus <= 0) continue;
    const Marks marks = mark_words(x, tile * kTile + warp() * kWarpBits, n, threshold);
    int32_t total;
    int64_t rank = block_scan(int32_t(__popc(marks.equal)), partial, &total);
    uint32_t word = marks.reach;
    for (uint32_t rest = marks.equal; rest; rest &= rest - 1, ++rank)
      if (rank >= keep) word &= ~(rest & (0u - rest));
    store_word(bitmap, tile_word(tile), n, word);
    if (threadIdx.x == 0) atomic_add(set, -surplus);
  }
}

__global__ void __launch_bounds__(kBlock)
    bitmap_indices_kernel(const uint8_t* bitmap, int64_t n, const float* x, const int64_t* offsets, int64_t count,
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
