// Parts of the norm of a bucket, computed by teams.
#pragma once

#include "common/quantize.h"
#include "cuda/block/teams.cuh"

namespace gradzip::cuda {

// The contribution of `count` values to the norm of their bucket: the sum of squares or magnitudes, or the largest
// magnitude.
template <class F>
GZ_DEVICE double team_norm(Norm norm, int count, F value_at) {
  if (norm != Norm::max) {
    double sum = 0.0;
#pragma unroll 8
    for (int i = team_lane(); i < count; i += kTeam) {
      const double m = double(finite_magnitude(value_at(i)));
      sum += norm == Norm::l2 ? m * m : m;
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

}  // namespace gradzip::cuda
