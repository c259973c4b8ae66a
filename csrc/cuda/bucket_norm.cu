#include "cuda/bucket_norm.cuh"

#include "cuda/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {

// Enough for buckets of any length: there are parts when one is longer than a segment.
int64_t bucket_norms_workspace(int64_t n) { return (3 * ceil_div(n, kSumSegment) + 1) * int64_t(sizeof(double)); }

void bucket_norms(const float* x, int64_t n, int64_t bucket, int kind, float* norms, void* workspace,
                  cudaStream_t stream) {
  const Norm norm = Norm(kind);
  const int64_t buckets = ceil_div(n, bucket), segments = ceil_div(bucket < n ? bucket : n, kSumSegment);
  auto* parts = static_cast<double*>(workspace);
  launch(stream, grid_of(grid_for(ceil_div(buckets * segments, kBlock / kTeam))), kBlock, segment_norms_kernel, x, n,
         bucket, segments, norm, parts, norms);
  if (segments > 1)
    launch(stream, grid_of(grid_for(ceil_div(buckets, kBlock / kLanes))), kBlock, combine_norms_kernel, parts, buckets,
           segments, norm, norms);
}

}  // namespace gradzip::cuda
