#include "cuda/bucket_norms.cuh"

#include "cuda/block/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {
namespace {

template <class T>
void launch_segments(const T* x, int64_t n, int64_t bucket, int64_t segments, Norm norm, double* parts, float* norms,
                     cudaStream_t stream) {
  launch(stream, grid_of(grid_for(ceil_div(ceil_div(n, bucket) * segments, kBlock / kTeam))), kBlock,
         kernel<segment_norms_kernel<T>>, x, n, bucket, segments, norm, parts, norms);
}

}  // namespace

int64_t bucket_norms(void* workspace, const void* x, int dtype, int64_t n, int64_t bucket, int kind, float* norms,
                     cudaStream_t stream) {
  const Norm norm = Norm(kind);
  const int64_t buckets = ceil_div(n, bucket), segments = ceil_div(bucket < n ? bucket : n, kSumSegment);
  Arena arena(workspace);
  auto* parts = arena.take<double>(segments > 1 ? buckets * segments : 0);
  if (!workspace) return arena.nbytes();
  typed(x, dtype, [&](auto* of) { launch_segments(of, n, bucket, segments, norm, parts, norms, stream); });
  if (segments > 1)
    launch(stream, grid_of(grid_for(ceil_div(buckets, kBlock / kLanes))), kBlock, kernel<combine_norms_kernel>, parts,
           buckets, segments, norm, norms);
  return 0;
}

}  // namespace gradzip::cuda
