// Norms of buckets, added up by teams.
#pragma once

#include "common/quantize.h"
#include "cuda/teams.cuh"

namespace gradzip::cuda {

// What `count` values add to the norm of their bucket: the sum of squares, or the largest magnitude.
template <class F>
GZ_DEVICE double team_norm(Norm norm, int count, F value_at) {
  if (norm == Norm::l2) {
    double sum = 0.0;
#pragma unroll 8
    for (int i = team_lane(); i < count; i += kTeam) {
      const double m = double(finite_magnitude(value_at(i)));
      sum += m * m;
    }
    return team_sum(sum);
  }
  uint32_t most = 0;
#pragma unroll 8
  for (int i = team_lane(); i < count; i += kTeam) {
    const uint32_t m = float_bits(finite_magnitude(value_at(i)));
    most = most > m ? most : m;
  }
#pragma unroll
  for (int d = kTeam / 2; d > 0; d /= 2) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, most, d);
    most = most > other ? most : other;
  }
  return double(bits_float(most));
}

GZ_DEVICE float finish_norm(Norm norm, double total) {
  return norm_value(norm == Norm::l2 ? __dsqrt_rn(total) : total);
}

// One team per segment. Norms where a bucket is one segment, else `parts` of them.
static __global__ void __launch_bounds__(kBlock)
    segment_norms_kernel(const float* x, int64_t n, int64_t bucket, int64_t segments, Norm norm, double* parts,
                         float* norms) {
  const int64_t tasks = (n + bucket - 1) / bucket * segments;
  for (int64_t first = grid_thread() / kLanes * kTeams; first < tasks; first += grid_threads() / kLanes * kTeams) {
    const int64_t task = first + team(), b = task / segments, from = task % segments * kSumSegment;
    const int64_t begin = b * bucket + from;
    int64_t count = bucket - from < n - begin ? bucket - from : n - begin;
    count = task >= tasks || count < 0 ? 0 : count < kSumSegment ? count : kSumSegment;
    const double part = team_norm(norm, int(count), [&](int i) { return __ldg(x + begin + i); });
    if (team_lane() == 0 && task < tasks) {
      if (segments == 1)
        norms[b] = finish_norm(norm, part);
      else
        parts[task] = part;
    }
  }
}

// One warp per bucket.
static __global__ void __launch_bounds__(kBlock)
    combine_norms_kernel(const double* parts, int64_t buckets, int64_t segments, Norm norm, float* norms) {
  for (int64_t b = grid_thread() / kLanes; b < buckets; b += grid_threads() / kLanes) {
    double total = 0.0;
    for (int64_t first = 0; first < segments; first += kLanes) {
      const double mine = first + lane() < segments ? parts[b * segments + first + lane()] : 0.0;
#pragma unroll
      for (int j = 0; j < kLanes; ++j) {
        const double part = __shfl_sync(kAllLanes, mine, j);
        total = norm == Norm::l2 ? total + part : total > part ? total : part;
      }
    }
    if (lane() == 0) norms[b] = finish_norm(norm, total);
  }
}

}  // namespace gradzip::cuda
