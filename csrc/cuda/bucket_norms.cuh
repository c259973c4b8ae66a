// Norms of buckets of any length.
#pragma once

#include "common/half.h"
#include "cuda/block/team_norm.cuh"

namespace gradzip::cuda {

// One team per segment. Writes norms if a bucket is one segment, `parts` otherwise.
template <class T>
__global__ void __launch_bounds__(kBlock) segment_norms_kernel(const T* x, int64_t n, int64_t bucket, int64_t segments,
                                                               Norm norm, double* parts, float* norms) {
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
        norms[b] = finish_norm(norm, part);
      else
        parts[task] = part;
    }
  }
}

// One warp per bucket.
__global__ void __launch_bounds__(kBlock)
    combine_norms_kernel(const double* parts, int64_t buckets, int64_t segments, Norm norm, float* norms) {
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
    if (lane() == 0) norms[b] = finish_norm(norm, total);
  }
}

}  // namespace gradzip::cuda
