// Which elements of a tile a selection keeps (common/selection.h).
#pragma once

#include "common/selection.h"
#include "cuda/block/bitmap_tiles.cuh"

namespace gradzip::cuda {

// The bits of 32 values per lane: which are at least the threshold, and which equal it.
struct Marks {
  uint32_t reach, equal;
};

// Of this thread's word of a tile.
GZ_DEVICE Marks mark_words(const float* x, int64_t tile, int64_t n, uint32_t threshold) {
  const int64_t first = tile * kTile + warp() * kWarpBits;
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

// The marks of values that reach the threshold, but for those that equal it and are not among the first `keep` of the
// tile. All threads of the block call it.
GZ_DEVICE uint32_t without_surplus_ties(const Marks& marks, int64_t keep, int32_t* partial) {
  int32_t total;
  int64_t rank = block_scan(int32_t(__popc(marks.equal)), partial, &total);
  uint32_t word = marks.reach;
  for (uint32_t rest = marks.equal; rest; rest &= rest - 1, ++rank)
    if (rank >= keep) word &= ~(rest & (0u - rest));
  return word;
}

GZ_DEVICE uint32_t threshold_of(const Selection* selection) {
  return magnitude(selection->threshold);  // -0 is 0
}

}  // namespace gradzip::cuda
