// The launches that compute the norms of buckets of any length.
#pragma once

#include "cuda/bucket_norm.cuh"
#include "cuda/launch.h"

namespace gradzip::cuda {

// Doubles that suffice for the parts of buckets of any length: a bucket has parts when it is longer than a segment.
inline int64_t most_norm_parts(int64_t n) { return 3 * ceil_div(n, kSumSegment) + 1; }

inline void bucket_norms(const float* x, int64_t n, int64_t bucket, Norm norm, float* norms, double* parts,
                         cudaStream_t stream) {
  const int64_t buckets = ceil_div(n, bucket), segments = ceil_div(bucket < n ? bucket : n, kSumSegment);
  const unsigned grid = grid_for(ceil_div(buckets * segments, kBlock / kTeam));
  launch(stream, grid_of(grid), kBlock, segment_norms_kernel, x, n, bucket, segments, norm, parts, norms);
  if (segments > 1)
    launch(stream, grid_of(grid_for(ceil_div(buckets, kBlock / kLanes))), kBlock, combine_norms_kernel, parts, buckets,
           segments, norm, norms);
}

}  // namespace gradzip::cuda
