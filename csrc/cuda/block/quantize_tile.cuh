// A block computes the levels of a tile and the norms of its buckets.
#pragma once

#include "common/philox.h"
#include "cuda/block/quads.cuh"
#include "cuda/block/team_norm.cuh"
#include "cuda/block/tile_buckets.cuh"

namespace gradzip::cuda {

template <class T>
struct Quantizer {
  const T* x;
  int64_t n, bucket;
  int bits;
  Norm norm;
  uint64_t key;
  float* norms;
};

constexpr int kQuads = kMostTile / (4 * kBlock);  // of a tile per thread

// Norms of the buckets of a tile; the first begins with the tile.
template <class T>
GZ_DEVICE void tile_norms(const Quantizer<T>& q, const float* tile, int count, int64_t first_bucket) {
  const int bucket = int(q.bucket), buckets = (count + bucket - 1) / bucket;
  for (int first = warp() * kTeams; first < buckets; first += warps() * kTeams) {
    const int b = first + team(), begin = b * bucket;
    const int left = count - begin, size = left < 0 ? 0 : left < bucket ? left : bucket;
    const double part = team_norm(q.norm, size, [&](int i) { return tile[begin + i]; });
    if (team_lane() == 0 && b < buckets) q.norms[first_bucket + b] = finish_norm(q.norm, part);
  }
}

// put(i, value, level) for each four elements of a tile of `count` <= kMostTile elements, which begins at a multiple of
// 8; values and levels past its end are 0. With kNorms the tile is whole buckets, and their norms are computed first, in the
// shared memory `tile`, which put may overwrite.
template <bool kNorms, class T, class F>
GZ_DEVICE void quantize_tile(const Quantizer<T>& q, int64_t first, int count, float* tile, F put) {
  float value[kQuads][4];
  const int mine = 4 * int(threadIdx.x);
#pragma unroll
  for (int j = 0; j < kQuads; ++j) load4(q.x + first, mine + j * 4 * kBlock, count, value[j]);
  const TileBuckets buckets(first, q.bucket);
  if (kNorms) {
#pragma unroll
    for (int j = 0; j < kQuads; ++j)
      *reinterpret_cast<float4*>(tile + mine + j * 4 * kBlock) =
          make_float4(value[j][0], value[j][1], value[j][2], value[j][3]);
    __syncthreads();
    tile_norms(q, tile, count, buckets.first);
    __syncthreads();
  }
  const int32_t s = top_level(q.bits);
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
    const int i = mine + j * 4 * kBlock;
    if (i >= count) continue;
    const Philox4 draw = philox(q.key, uint64_t(first + i) / 4);
    int32_t level[4] = {0, 0, 0, 0};
    LevelScale scale{};
    buckets.for_four(i, count, [&](int k, int64_t bucket, bool another) {
      if (another) scale = level_scale(q.norms[bucket], s);
      level[k] = stochastic_level(finite_magnitude(value[j][k]), scale, s, draw.v[k]);
    });
    put(i, value[j], level);
  }
}

}  // namespace gradzip::cuda
