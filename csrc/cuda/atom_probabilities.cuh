// ATOMO's probabilities, in the rounds of common/atom_probabilities.h. A round is one kernel, whose last block updates
// the state for the next round; all rounds are queued at once, and unneeded ones return immediately. A grid of one
// block runs all remaining rounds.
#pragma once

#include "common/atom_probabilities.h"
#include "cuda/block/quads.cuh"
#include "cuda/block/teams.cuh"

namespace gradzip::cuda {

static_assert(kSplitLanes == kBlock, "block_sum adds up in the order of the CPU");

constexpr int kBlockTeams = kBlock / kTeam;

// Zero at launch.
struct WaterState {
  Water water;
  uint32_t ticket;
};

// One team per segment.
template <class T>
__global__ void __launch_bounds__(kBlock)
    split_atoms_kernel(const T* atoms, int64_t n, double budget, Split* parts, WaterState* state) {
  __shared__ double rests[kLanes];
  __shared__ int64_t aboves[kLanes];
  const int64_t segments = (n + kSplitSegment - 1) / kSplitSegment;
  while (to_be_split(state->water)) {
    const Limits at = split_limits(state->water);
    for (int64_t first = grid_thread() / kLanes * kTeams; first < segments; first += grid_threads() / kLanes * kTeams) {
      const int64_t segment = first + team(), begin = segment * kSplitSegment, left = n - begin;
      const int count = int(left < 0 ? 0 : left < kSplitSegment ? left : kSplitSegment);
      double rest = 0.0;
      int above = 0;
#pragma unroll 8
      for (int i = team_lane(); i < count; i += kTeam) {
        const double m = fabs(double(__ldg(atoms + begin + i))) * at.unit;
        rest += m > at.upto ? 0.0 : m;
        above += m > at.over;
      }
      rest = team_sum(rest);
      above = team_sum(above);
      if (team_lane() == 0 && segment < segments) parts[segment] = {rest, above};
    }
    if (!last_block(&state->ticket)) return;
    Split all{0.0, 0};
    for (int64_t j = threadIdx.x; j < segments; j += kBlock) {
      all.rest += parts[j].rest;
      all.above += parts[j].above;
    }
    all = {block_sum(all.rest, rests), block_sum(all.above, aboves)};
    if (threadIdx.x == 0) {
      fill_water(&state->water, all, budget);
      state->ticket = 0;
    }
    if (gridDim.x > 1) return;
    __syncthreads();
  }
}

template <class T>
__global__ void __launch_bounds__(kBlock)
    atom_probabilities_kernel(const T* atoms, int64_t n, const WaterState* state, T* p, int32_t* failed) {
  const Water water = state->water;
  if (water.stage == Filling::failed && grid_thread() == 0) report(failed);
  for (int64_t i = grid_thread(); i < n; i += grid_threads())
    p[i] = water.stage == Filling::failed ? T(undecodable()) : T(atom_probability(water, fabs(double(atoms[i]))));
}

}  // namespace gradzip::cuda
