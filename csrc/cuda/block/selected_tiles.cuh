// Where the elements that a selection keeps of each tile go (common/selection.h).
#pragma once

#include "common/selection.h"
#include "cuda/block/block.cuh"

namespace gradzip::cuda {

// What is kept of a tile: the elements above the threshold, and the first `ties` of those equal to it.
struct SelectedTile {
  uint32_t above, equal, ties;
  uint32_t candidates;  // for those who find the elements in a list
  int64_t offset;  // the elements that are kept of tiles before
};

// From `above` and `equal` to `ties` and `offset`, by all kThreads threads of a block. most: elements of a tile.
template <int kThreads>
GZ_DEVICE void place_tiles(SelectedTile* tiles, int64_t count, int64_t most, int64_t ties_of_all) {
  __shared__ uint64_t partial[kLanes];
  int64_t above = 0, equal = 0;
  for (int64_t first = 0; first < count; first += kThreads) {
    const int64_t i = first + threadIdx.x;
    SelectedTile* tile = tiles + i;
    // Both sums fit 32 bits: a block has fewer than 2^23 elements.
    const uint64_t mine = i < count ? tile->above | uint64_t(tile->equal) << 32 : 0;
    uint64_t sum;
    const uint64_t before = block_scan(mine, partial, &sum);
    if (i < count) {
      const int64_t larger = above + int64_t(before & 0xffffffffu), ties = equal + int64_t(before >> 32);
      const int64_t left = ties_of_all > ties ? ties_of_all - ties : 0;
      tile->offset = larger + (ties_of_all - left);
      tile->ties = uint32_t(left < most ? left : most);
    }
    above += int64_t(sum & 0xffffffffu);
    equal += int64_t(sum >> 32);
  }
}

}  // namespace gradzip::cuda
