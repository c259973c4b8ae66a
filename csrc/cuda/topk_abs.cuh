// The elements of selections, with their indices: a bitmap of what reaches the threshold, whose surplus ties are found
// again in the few tiles that have some.
#pragma once

#include "common/topk_abs.h"
#include "cuda/block/marks.cuh"
#include "cuda/block/selected_tiles.cuh"
#include "cuda/select.cuh"

namespace gradzip::cuda {

// Zero at the first pass of the selection.
struct TopkState {
  SelectState select;
  uint32_t ticket;
};

struct TopkEntry {
  TopkSource source;
  TopkState* state;
  SelectedTile* tiles;
  uint8_t* bitmap;
};

// Writes the bitmap, and where the elements to keep of each tile go.
__global__ void __launch_bounds__(kBlock) topk_mark_kernel(Batch<TopkEntry> batch) {
  __shared__ uint32_t partial[kLanes];
  const auto [source, state, tiles, bitmap] = batch.of[blockIdx.y];
  const uint32_t threshold = threshold_of(source.selection);
  for (int64_t tile = blockIdx.x; tile * kTile < source.n; tile += gridDim.x) {
    const Marks marks = mark_words(source.x, tile, source.n, threshold);
    store_word(bitmap, tile_word(tile), source.n, marks.reach);
    // Both fit 16 bits.
    const uint32_t sums = block_sum(uint32_t(__popc(marks.reach)) | uint32_t(__popc(marks.equal)) << 16, partial);
    if (threadIdx.x != 0) continue;
    tiles[tile].above = (sums & 0xffff) - (sums >> 16);
    tiles[tile].equal = sums >> 16;
  }
  if (last_block(&state->ticket))
    place_tiles<kBlock>(tiles, (source.n + kTile - 1) / kTile, kTile, source.selection->ties);
}
static_assert(kTile < 1 << 16, "two counts in a word");

__global__ void __launch_bounds__(kBlock) topk_write_kernel(Batch<TopkEntry> batch) {
  __shared__ int32_t partial[kLanes];
  const TopkEntry& entry = batch.of[blockIdx.y];
  const float* x = entry.source.x;
  const int64_t n = entry.source.n;
  int32_t* indices = entry.source.indices;
  float* values = entry.source.values;
  for (int64_t tile = blockIdx.x; tile * kTile < n; tile += gridDim.x) {
    const SelectedTile of = entry.tiles[tile];
    if (of.above == 0 && (of.equal == 0 || of.ties == 0)) continue;
    uint32_t word;
    if (of.ties < of.equal)
      word = without_surplus_ties(mark_words(x, tile, n, threshold_of(entry.source.selection)), of.ties, partial);
    else
      word = load_word(entry.bitmap, tile_word(tile), n);
    for_each_bit_of<true>(
        word, tile, n, of.offset, [&](int64_t i, bool, int64_t) { return __ldg(x + i); },
        [&](int64_t i, int64_t rank, float value) {
          indices[rank] = int32_t(i);
          values[rank] = value;
        });
  }
}

}  // namespace gradzip::cuda
