// Sums in the order of common/sums.h: the 16 threads of a team, half a warp, are the lanes of a segment.
#pragma once

#include "common/sums.h"
#include "cuda/block/block.cuh"

namespace gradzip::cuda {

constexpr int kTeam = kSumLanes;
constexpr int kTeams = kLanes / kTeam;  // per warp

GZ_DEVICE int team() { return lane() / kTeam; }
GZ_DEVICE int team_lane() { return lane() % kTeam; }

// The sum over a team, in pairs. All lanes of the warp take part.
template <class T>
GZ_DEVICE T team_sum(T value) {
#pragma unroll
  for (int d = kTeam / 2; d > 0; d /= 2) value += __shfl_xor_sync(kAllLanes, value, d);
  return value;
}

}  // namespace gradzip::cuda
