#include "cuda/bucket_norms.cuh"

#include <algorithm>

#include "cuda/block/launch.h"
#include "cuda/block/table.h"
#include "cuda/bucket_norms.h"

namespace gradzip::cuda {
namespace {

// Vectors of Ts; of each, `most` segments at most. `parts` has room for those of a launch.
template <class T>
void launch_all(const T*, const std::vector<NormsSource>& vectors, int64_t bucket, int64_t segments, int64_t most,
                Norm norm, double* parts, cudaStream_t stream) {
  for_each_batch<kNormsBatch>(vectors, [&](const auto& batch, unsigned some) {
    launch(stream, grid_of(grid_for_each(some, ceil_div(most, kBlock / kTeam)), some), kBlock,
           kernel<segment_norms_kernel<T>>, batch, bucket, segments, norm, most, parts);
    if (segments > 1)
      launch(stream, grid_of(grid_for_each(some, ceil_div(most / segments, kBlock / kLanes)), some), kBlock,
             kernel<combine_norms_kernel>, batch, bucket, segments, norm, most, parts);
  });
}

}  // namespace

int64_t bucket_norms_all(void* workspace, const std::vector<NormsSource>& vectors, int dtype, int64_t bucket, int norm,
                         cudaStream_t stream) {
  int64_t longest = 0;
  for (const NormsSource& vector : vectors) longest = std::max(longest, vector.n);
  const int64_t segments = ceil_div(std::min(bucket, longest), kSumSegment);  // of a bucket
  const int64_t most = ceil_div(longest, bucket) * segments;
  Arena arena(workspace);
  auto* parts = arena.take<double>(segments > 1 ? most * std::min<int64_t>(vectors.size(), kNormsBatch) : 0);
  if (!workspace) return arena.nbytes();
  const void* const any = nullptr;
  typed(any, dtype, [&](auto* of) { launch_all(of, vectors, bucket, segments, most, Norm(norm), parts, stream); });
  return 0;
}

int64_t bucket_norms(void* workspace, const void* x, int dtype, int64_t n, int64_t bucket, int norm, float* norms,
                     cudaStream_t stream) {
  return bucket_norms_all(workspace, {{x, n, norms}}, dtype, bucket, norm, stream);
}

}  // namespace gradzip::cuda
