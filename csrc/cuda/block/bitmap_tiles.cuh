// Iteration over a status bitmap by warps. A warp takes 1024 bits, lane j the j-th word of 32 bits, and the 32 lanes
// take the items of a word together, so that both words and items are accessed contiguously.
#pragma once

#include "cuda/block/block.cuh"

namespace gradzip::cuda {

constexpr int64_t kWarpBits = kLanes * 32;
constexpr int64_t kTile = kBlock / kLanes * kWarpBits;  // bits a block takes at a time

// Word j of a bitmap of n bits, at any alignment; bits past n are 0. Reads no byte past bit n.
GZ_DEVICE uint32_t load_word(const uint8_t* bitmap, int64_t j, int64_t n) {
  const int64_t left = n - 32 * j;
  if (left <= 0) return 0;
  const uint8_t* at = bitmap + 4 * j;
  if (left >= 32 && reinterpret_cast<uintptr_t>(at) % 4 == 0) return __ldg(reinterpret_cast<const uint32_t*>(at));
  const int bytes = left >= 32 ? 4 : int(left + 7) / 8;
  uint32_t word = 0;
  for (int b = 0; b < bytes; ++b) word |= uint32_t(at[b]) << (8 * b);
  return left >= 32 ? word : word & ((1u << left) - 1);
}

GZ_DEVICE void store_word(uint8_t* bitmap, int64_t j, int64_t n, uint32_t word) {
  const int64_t left = n - 32 * j;
  if (left <= 0) return;
  uint8_t* at = bitmap + 4 * j;
  if (left >= 32 && reinterpret_cast<uintptr_t>(at) % 4 == 0) {
    *reinterpret_cast<uint32_t*>(at) = word;
    return;
  }
  const int bytes = left >= 32 ? 4 : int(left + 7) / 8;
  for (int b = 0; b < bytes; ++b) at[b] = uint8_t(word >> (8 * b));
}

// This lane's word of a tile.
GZ_DEVICE int64_t tile_word(int64_t tile) { return tile * (kTile / 32) + int64_t(threadIdx.x); }

// store(i, rank, load(i, set, rank)) for all bits i < n of a tile, or for the set bits only. word: this lane's. rank is
// the number of bits set before i, `offset` of them in tiles before. Several loads are in flight before the first store.
template <bool kOnlySet, class Load, class Store>
GZ_DEVICE void for_each_bit_of(uint32_t word, int64_t tile, int64_t n, int64_t offset, Load load, Store store) {
  __shared__ uint32_t partial[kLanes];
  constexpr int kInFlight = 4;
  const unsigned below = (1u << lane()) - 1;
  uint32_t total;
  const uint32_t before = block_scan(uint32_t(__popc(word)), partial, &total);
  const int64_t first = tile * kTile + warp() * kWarpBits + lane();
  for (int j = 0; j < kLanes; j += kInFlight) {
    decltype(load(int64_t(0), true, int64_t(0))) values[kInFlight];
    int64_t ranks[kInFlight];
    bool active[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const uint32_t bits = __shfl_sync(kAllLanes, word, j + u), rank = __shfl_sync(kAllLanes, before, j + u);
      const int64_t i = first + 32 * (j + u);
      const bool set = bits >> lane() & 1;
      active[u] = kOnlySet ? set : i < n;
      ranks[u] = offset + rank + __popc(bits & below);
      if (active[u]) values[u] = load(i, set, ranks[u]);
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u)
      if (active[u]) store(first + 32 * (j + u), ranks[u], values[u]);
  }
}

// The same for all tiles of a bitmap: offsets[t] is the number of bits set before tile t.
template <bool kOnlySet, class Load, class Store>
GZ_DEVICE void for_each_bit(const uint8_t* bitmap, int64_t n, const int64_t* offsets, Load load, Store store) {
  for (int64_t tile = blockIdx.x; tile * kTile < n; tile += gridDim.x)
    for_each_bit_of<kOnlySet>(load_word(bitmap, tile_word(tile), n), tile, n, offsets[tile], load, store);
}

// counts[t] = the number of bits set in tile t.
[[maybe_unused]] static __global__ void __launch_bounds__(kBlock)
    count_bits_kernel(const uint8_t* bitmap, int64_t n, uint32_t* counts) {
  __shared__ uint32_t partial[kLanes];
  for (int64_t tile = blockIdx.x; tile * kTile < n; tile += gridDim.x) {
    const uint32_t set = block_sum(uint32_t(__popc(load_word(bitmap, tile_word(tile), n))), partial);
    if (threadIdx.x == 0) counts[tile] = set;
  }
}

// offsets[t] = counts[0] + ... + counts[t - 1] for t <= tiles; returns the total. counts[t] < 2^20. One block: tiles are
// large, so there are few.
constexpr int kScanBlock = 1024;
template <int kThreads = kScanBlock, class Counts>
GZ_DEVICE int64_t scan_counts(Counts counts, int64_t tiles, int64_t* offsets) {
  constexpr int kEach = 4;  // counts of a thread: most of the time goes to the sums over threads
  __shared__ uint32_t partial[kLanes];
  int64_t carry = 0;
  for (int64_t first = 0; first < tiles; first += kEach * kThreads) {
    const int64_t tile = first + kEach * int(threadIdx.x);
    uint32_t count[kEach], own = 0, sum;
#pragma unroll
    for (int j = 0; j < kEach; ++j) own += count[j] = tile + j < tiles ? counts[tile + j] : 0u;
    int64_t before = carry + block_scan(own, partial, &sum);
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if (tile + j < tiles) offsets[tile + j] = before;
      before += count[j];
    }
    carry += sum;
  }
  if (threadIdx.x == 0) offsets[tiles] = carry;
  return carry;
}

[[maybe_unused]] static __global__ void __launch_bounds__(kScanBlock)
    scan_counts_kernel(const uint32_t* counts, int64_t tiles, int64_t* offsets, int64_t* total) {
  const int64_t sum = scan_counts(counts, tiles, offsets);
  if (threadIdx.x == 0) *total = sum;
}

}  // namespace gradzip::cuda
