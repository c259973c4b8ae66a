// Independent draws, each with its own probability. A thread makes four at a time, as the generator does.
#pragma once

#include "common/bernoulli.h"
#include "common/philox.h"
#include "cuda/block/bitmap_tiles.cuh"
#include "cuda/block/quads.cuh"

namespace gradzip::cuda {

__global__ void __launch_bounds__(kBlock) bernoulli_kernel(const float* p, int64_t n, uint64_t key, uint8_t* bitmap) {
  constexpr int kThreads = 8;                      // per word
  constexpr int kWords = kLanes / kThreads;        // words per warp at a time
  constexpr int kSteps = kLanes / kWords, kInFlight = 4;
  for (int64_t tile = blockIdx.x; tile * kTile < n; tile += gridDim.x) {
    const int64_t first = tile * kTile + warp() * kWarpBits + 4 * lane();
    uint32_t mine = 0;
    for (int step = 0; step < kSteps; step += kInFlight) {
      float value[kInFlight][4];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) load4(p, first + (step + u) * 4 * kLanes, n, value[u]);
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const Philox4 draw = philox(key, uint64_t(first + (step + u) * 4 * kLanes) / 4);
        uint32_t word = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) word |= uint32_t(is_drawn(value[u][j], draw.v[j])) << j;
        word <<= 4 * (lane() % kThreads);
#pragma unroll
        for (int d = 1; d < kThreads; d *= 2) word |= __shfl_xor_sync(kAllLanes, word, d);
        const uint32_t found = __shfl_sync(kAllLanes, word, lane() % kWords * kThreads);
        if (lane() / kWords == step + u) mine = found;
      }
    }
    store_word(bitmap, tile_word(tile), n, mine);
  }
}

}  // namespace gradzip::cuda
