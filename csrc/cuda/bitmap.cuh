// Status bitmaps: which elements a selection keeps, how many there are, and where.
#pragma once

#include "cuda/block/marks.cuh"

namespace gradzip::cuda {

// Writes the bitmap with all ties set, the number of ties of each tile, and *set, 0 at launch, the number of bits set.
__global__ void __launch_bounds__(kBlock) mark_kernel(const float* x, int64_t n, const Selection* selection,
                                                      uint8_t* bitmap, uint32_t* equals, int64_t* set) {
  __shared__ uint32_t partial[kLanes];
  const uint32_t threshold = threshold_of(selection);
  int64_t total = 0;
  for (int64_t tile = blockIdx.x; tile * kTile < n; tile += gridDim.x) {
    const Marks marks = mark_words(x, tile, n, threshold);
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
    const uint32_t word = without_surplus_ties(mark_words(x, tile, n, threshold), keep, partial);
    store_word(bitmap, tile_word(tile), n, word);
    if (threadIdx.x == 0) atomic_add(set, -surplus);
  }
}

__global__ void __launch_bounds__(kBlock)
    bitmap_indices_kernel(const uint8_t* bitmap, int64_t n, const int64_t* offsets, int64_t count, int32_t* indices) {
  if (offsets[(n + kTile - 1) / kTile] != count) return;
  for_each_bit<true>(
      bitmap, n, offsets, [&](int64_t i, bool, int64_t) { return int32_t(i); },
      [&](int64_t, int64_t rank, int32_t index) { indices[rank] = index; });
}

}  // namespace gradzip::cuda
