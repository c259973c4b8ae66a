// 1-bit SGD: the means of the values of either sign per row, and decoding.
#pragma once

#include "common/one_bit.h"
#include "cuda/bitmap_tiles.cuh"
#include "cuda/quads.cuh"
#include "cuda/teams.cuh"
#include "cuda/tile_buckets.cuh"

namespace gradzip::cuda {

// One team per segment of a row. Writes means if a row is one segment, its parts otherwise.
__global__ void __launch_bounds__(kBlock)
    side_sums_kernel(const float* x, int64_t rows, int64_t columns, int64_t segments, const uint8_t* packed,
                     Sides* parts, float* means) {
  const int64_t tasks = rows * segments;
  for (int64_t first = grid_thread() / kLanes * kTeams; first < tasks; first += grid_threads() / kLanes * kTeams) {
    const int64_t task = first + team(), row = task / segments, from = task % segments * kSumSegment;
    const int64_t begin = row * columns + from, left = columns - from;
    const int64_t count = task >= tasks ? 0 : left < kSumSegment ? left : kSumSegment, end = begin + count;
    Sides sides{0.0, 0.0, 0};
#pragma unroll 8
    for (int64_t i = begin + team_lane(); i < end; i += kTeam) {
      const float value = __ldg(x + i);
      sides.positive += double(value > 0.0f ? value : 0.0f);
      sides.negative += double(value < 0.0f ? value : 0.0f);
    }
    for (int64_t word = begin / 32 + team_lane(); 32 * word < end; word += kTeam) {
      const uint32_t before = word == begin / 32 ? (1u << begin % 32) - 1 : 0u;
      sides.set += __popc(load_word(packed, word, end) & ~before);
    }
    sides = {team_sum(sides.positive), team_sum(sides.negative), team_sum(sides.set)};
    if (team_lane() == 0 && task < tasks) {
      if (segments == 1)
        side_means(sides, columns, means + 2 * row);
      else
        parts[task] = sides;
    }
  }
}

// One warp per row.
__global__ void __launch_bounds__(kBlock)
    combine_sides_kernel(const Sides* parts, int64_t rows, int64_t columns, int64_t segments, float* means) {
  for (int64_t row = grid_thread() / kLanes; row < rows; row += grid_threads() / kLanes) {
    Sides total{0.0, 0.0, 0};
    for (int64_t first = 0; first < segments; first += kLanes) {
      Sides mine{0.0, 0.0, 0};
      if (first + lane() < segments) mine = parts[row * segments + first + lane()];
#pragma unroll 8
      for (int j = 0; j < kLanes; ++j) {
        total.positive += __shfl_sync(kAllLanes, mine.positive, j);
        total.negative += __shfl_sync(kAllLanes, mine.negative, j);
      }
      total.set += warp_sum(mine.set);
    }
    if (lane() == 0) side_means(total, columns, means + 2 * row);
  }
}

__global__ void __launch_bounds__(kBlock)
    one_bit_decode_add_kernel(const uint8_t* packed, const float* means, int64_t n, int64_t columns, float weight,
                              float* out, int32_t* failed) {
  bool bad = false;
  for (int64_t first = int64_t(blockIdx.x) * kMostTile; first < n; first += int64_t(gridDim.x) * kMostTile) {
    const int count = int(n - first < kMostTile ? n - first : kMostTile);
    const TileBuckets rows(first, columns);
    for (int i = 4 * int(threadIdx.x); i < count; i += 4 * kBlock) {
      const uint32_t bits = uint32_t(__ldg(packed + (first + i) / 8)) >> (i % 8);
      float positive = 0.0f, negative = 0.0f, value[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      rows.for_four(i, count, [&](int k, int64_t row, bool another) {
        if (another) {
          positive = __ldg(means + 2 * row);
          negative = __ldg(means + 2 * row + 1);
          const bool valid = magnitude(positive) < kInfBits && magnitude(negative) < kInfBits;
          bad |= !valid;
          positive = valid ? weight * positive : undecodable();
          negative = valid ? weight * negative : undecodable();
        }
        value[k] = bits >> k & 1 ? negative : positive;
      });
      add4(out + first, i, count, value);
    }
  }
  if (bad) report(failed);
}

}  // namespace gradzip::cuda
