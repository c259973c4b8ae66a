// Whether a tile of buckets can be quantized in one read.
#pragma once

#include <numeric>

#include "cuda/bucket_norm.h"
#include "cuda/quantize.cuh"

namespace gradzip::cuda {

// The elements of a tile of whole buckets that begins at multiples of 8; 0 where there is none.
inline int tile_of_buckets(int64_t bucket) {
  if (bucket > kMostTile) return 0;
  const int64_t together = std::lcm<int64_t>(bucket, 8);
  return int(kMostTile / together * together);
}

}  // namespace gradzip::cuda
