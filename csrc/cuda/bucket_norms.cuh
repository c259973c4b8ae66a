// Norms of buckets of any length.
#pragma once

#include "common/half.h"
#include "cuda/block/table.cuh"
#include "cuda/block/team_norm.cuh"

namespace gradzip::cuda {

constexpr int kNormsBatch = 160;  // vectors whose table fits the 4 KB of kernel arguments

// One team per segment. Writes norms if a bucket is one segment, otherwise `parts`, which has room for `most` of a vector.
template <class T>
__global__ void __launch_bounds__(kBlock)
    segment_norms_kernel(Batch<NormsSource, kNormsBatch> batch, int64_t bucket, int64_t segments, Norm norm,
                         int64_t most, double* parts) {
  const NormsSource& source = batch.of[blockIdx.y];
  const T* x = static_cast<const T*>(source.x);
  const int64_t n = source.n;
  parts += blockIdx.y * most;
  const int64_t tasks = (n + bucket - 1) / bucket * segments;
  for (int64_t first = grid_thread() / kLanes * kTeams; first < tasks; first += grid_threads() / kLanes * kTeams) {
    const int64_t task = first + team(), b = task / segments, from = task % segments * kSumSegment;
    const int64_t begin = b * bucket + from;
    int64_t count = bucket - from < n - begin ? bucket - from : n - begin;
    count = task >= tasks || count < 0 ? 0 : count < kSumSegment ? count : kSumSegment;
    const double part = team_norm(norm, int(count), [&](int i) {
      if constexpr (sizeof(T) == 4)
        return __ldg(x + begin + i);
      else
        return to_float(x[begin + i]);
    });
    if (team_lane() == 0 && task < tasks) {
      if (segments == 1)
        source.norms[b] = finish_norm(norm, part);
      else
        parts[task] = part;
    }
  }
}

// One warp per bucket.
__global__ void __launch_bounds__(kBlock)
    combine_norms_kernel(Batch<NormsSource, kNormsBatch> batch, int64_t bucket, int64_t segments, Norm norm,
                         int64_t most, const double* parts) {
  const int64_t buckets = (batch.of[blockIdx.y].n + bucket - 1) / bucket;
  parts += blockIdx.y * most;
  for (int64_t b = grid_thread() / kLanes; b < buckets; b += grid_threads() / kLanes) {
    double total = 0.0;
    for (int64_t first = 0; first < segments; first += kLanes) {
      const double mine = first + lane() < segments ? parts[b * segments + first + lane()] : 0.0;
#pragma unroll
      for (int j = 0; j < kLanes; ++j) {
        const double part = __shfl_sync(kAllLanes, mine, j);
        total = norm != Norm::max ? total + part : total > part ? total : part;
      }
    }
    if (lane() == 0) batch.of[blockIdx.y].norms[b] = finish_norm(norm, total);
  }
}

}  // namespace gradzip::cuda
