// The launches that compute the number of bits set before each tile of a bitmap.
#pragma once

#include "cuda/block/bitmap_tiles.cuh"
#include "cuda/block/launch.h"

namespace gradzip::cuda {
namespace {

struct BitmapOffsets {
  int64_t tiles;
  uint32_t* counts;
  int64_t* offsets;  // of tiles, then the total

  BitmapOffsets(Arena& arena, int64_t n)
      : tiles(ceil_div(n, kTile)), counts(arena.take<uint32_t>(tiles)), offsets(arena.take<int64_t>(tiles + 1)) {}

  unsigned grid() const { return grid_for(tiles); }

  void scan(int64_t* total, cudaStream_t stream) const {
    launch(stream, grid_of(1), kScanBlock, kernel<scan_counts_kernel>, counts, tiles, offsets, total);
  }
  void count(const uint8_t* bitmap, int64_t n, int64_t* total, cudaStream_t stream) const {
    launch(stream, grid_of(grid()), kBlock, kernel<count_bits_kernel>, bitmap, n, counts);
    scan(total, stream);
  }
};

}  // namespace
}  // namespace gradzip::cuda
