// The bucket of each element of a tile, with one long division per tile and none per element.
#pragma once

#include "cuda/block/block.cuh"

namespace gradzip::cuda {

constexpr int kMostTile = 4096;  // elements of a tile

struct TileBuckets {
  int64_t first;  // the bucket of the tile's first element
  int left;       // its remaining elements; any number >= kMostTile if it ends beyond the tile
  int span;       // elements of each following bucket, likewise
  float inverse;

  GZ_DEVICE TileBuckets(int64_t begin, int64_t bucket) : first(begin / bucket) {
    const int64_t rest = bucket - (begin - first * bucket);
    left = int(rest < kMostTile ? rest : kMostTile);
    span = int(bucket < kMostTile ? bucket : kMostTile);
    inverse = 1.0f / float(span);
  }
  // The bucket of element i of the tile, relative to `first`. The product is half an element away from the edges, so
  // its rounding does not matter.
  GZ_DEVICE int index(int i) const { return i < left ? 0 : 1 + int((float(i - left) + 0.5f) * inverse); }
  GZ_DEVICE int end(int index) const { return left + index * span; }

  // f(j, bucket, whether it is another bucket than that of the element before) for the elements i + j < count of four.
  template <class F>
  GZ_DEVICE void for_four(int i, int count, F f) const {
    int b = index(i), stop = end(b);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (i + j >= count) continue;
      const bool next = i + j == stop;
      if (next) ++b, stop += span;
      f(j, first + b, j == 0 || next);
    }
  }
};

}  // namespace gradzip::cuda
