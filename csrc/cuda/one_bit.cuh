// 1-bit SGD: the means of the values of either sign per row, and decoding.
#pragma once

#include "common/one_bit.h"
#include "cuda/block/bitmap_tiles.cuh"
#include "cuda/block/quads.cuh"
#include "cuda/block/table.cuh"
#include "cuda/block/teams.cuh"
#include "cuda/block/tile_buckets.cuh"

namespace gradzip::cuda {

struct SidesEntry {
  OneBitSource source;
  int64_t segments;  // of a row
  int64_t rounds;  // segments that a team takes, one after the other
  int64_t first_part, first_block;
};

// One team per segment of a row. Writes means if a row is one segment, its parts otherwise. *most, 0 at launch, becomes
// the bits of max |x|, unless it is null.
__global__ void __launch_bounds__(kBlock)
    side_sums_kernel(const SidesEntry* entries, int64_t count, Sides* parts, uint32_t* most) {
  const int64_t e = entry_of_block(entries, count);
  const SidesEntry entry = entries[e];
  const auto [x, rows, columns, key, packed, means] = entry.source;
  const int64_t segments = entry.segments, tasks = rows * segments;
  const int64_t per_round = kBlock / kTeam, begin_task = (blockIdx.x - entry.first_block) * entry.rounds * per_round;
  uint32_t largest = 0;
  for (int64_t round = 0; round < entry.rounds; ++round) {
    const int64_t task = begin_task + round * per_round + threadIdx.x / kTeam, row = task / segments;
    const int64_t from = task % segments * kSumSegment, left = columns - from;
    const int64_t begin = task < tasks ? row * columns + from : 0;
    const int64_t end = task < tasks ? begin + (left < kSumSegment ? left : kSumSegment) : 0;
    Sides sides{0.0, 0.0, 0};
#pragma unroll 8
    for (int64_t i = begin + team_lane(); i < end; i += kTeam) {
      const float value = __ldg(x + i);
      sides.positive += double(value > 0.0f ? value : 0.0f);
      sides.negative += double(value < 0.0f ? value : 0.0f);
      largest = largest > magnitude(value) ? largest : magnitude(value);
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
        parts[entry.first_part + task] = sides;
    }
  }
  largest = warp_max(largest);
  if (most && lane() == 0 && largest > 0) atomicMax(most + e, largest);
}

struct RowsEntry {
  int64_t rows, columns, segments, first_part;
  float* means;
  int64_t first_block;
};

// Adds the parts of rows of several segments. One warp per row.
__global__ void __launch_bounds__(kBlock)
    combine_sides_kernel(const RowsEntry* entries, int64_t count, const Sides* parts) {
  const RowsEntry entry = entries[entry_of_block(entries, count)];
  const int64_t row = (blockIdx.x - entry.first_block) * (kBlock / kLanes) + warp();
  if (row >= entry.rows) return;
  parts += entry.first_part + row * entry.segments;
  Sides total{0.0, 0.0, 0};
  for (int64_t first = 0; first < entry.segments; first += kLanes) {
    Sides mine{0.0, 0.0, 0};
    if (first + lane() < entry.segments) mine = parts[first + lane()];
#pragma unroll 8
    for (int j = 0; j < kLanes; ++j) {
      total.positive += __shfl_sync(kAllLanes, mine.positive, j);
      total.negative += __shfl_sync(kAllLanes, mine.negative, j);
    }
    total.set += warp_sum(mine.set);
  }
  if (lane() == 0) side_means(total, entry.columns, entry.means + 2 * row);
}

__global__ void __launch_bounds__(kBlock, 4) one_bit_decode_add_kernel(const WeightedSumEntry* entries, int64_t count,
                                                                       const OneBitTerm* terms, int32_t* failed) {
  constexpr int kQuads = kMostTile / (4 * kBlock);
  const WeightedSumEntry entry = entries[entry_of_block(entries, count)];
  const auto [out, n, own_terms, add, dtype] = entry.sum;
  const int64_t first = (blockIdx.x - entry.first_block) * kMostTile;
  const int length = int(n - first < kMostTile ? n - first : kMostTile), own = 4 * int(threadIdx.x);
  bool bad = false;
  float sum[kQuads][4] = {};
  if (add) {
#pragma unroll
    for (int q = 0; q < kQuads; ++q)
      load4_changing(static_cast<float*>(out) + first, own + 4 * kBlock * q, length, sum[q]);
  }
  for (int64_t t = entry.first_term; t < entry.first_term + own_terms; ++t) {
    const OneBitTerm term = terms[t];
    const float weight = float(term.weight);
    const TileBuckets rows(first, term.columns);
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const int i = own + 4 * kBlock * q;
      if (i >= length) continue;
      const uint32_t bits = uint32_t(__ldg(term.packed + (first + i) / 8)) >> (i % 8);
      float positive = 0.0f, negative = 0.0f;
      rows.for_four(i, length, [&](int k, int64_t row, bool another) {
        if (another) {
          positive = __ldg(term.means + 2 * row);
          negative = __ldg(term.means + 2 * row + 1);
          const bool valid = magnitude(positive) < kInfBits && magnitude(negative) < kInfBits;
          bad |= !valid;
          positive = valid ? weight * positive : undecodable();
          negative = valid ? weight * negative : undecodable();
        }
        sum[q][k] += bits >> k & 1 ? negative : positive;
      });
    }
  }
  typed_out(out, dtype, [&](auto* to) {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) store4(to + first, own + 4 * kBlock * q, length, sum[q]);
  });
  if (bad) report(failed);
}

}  // namespace gradzip::cuda
