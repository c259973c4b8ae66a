// One bit per sign, the majority vote, and decoding. A warp takes 1024 signs, a lane keeps one word of 32.
#pragma once

#include "common/philox.h"
#include "cuda/bitmap_tiles.cuh"
#include "cuda/quads.cuh"

namespace gradzip::cuda {

// Coins of the 32 elements from 32 * word on: draw number `word` of the key.
GZ_DEVICE uint32_t coins(uint64_t key, int64_t word) {
  const Philox4 draw = philox(key, uint64_t(word) / 4);
  const uint32_t low = word & 1 ? draw.v[1] : draw.v[0], high = word & 1 ? draw.v[3] : draw.v[2];
  return word & 2 ? high : low;
}

__global__ void __launch_bounds__(kBlock) signs_pack_kernel(const float* x, int64_t n, uint64_t key, uint8_t* packed) {
  for (int64_t tile = blockIdx.x; tile * kTile < n; tile += gridDim.x) {
    const int64_t first = tile * kTile + warp() * kWarpBits, word = tile_word(tile);
    uint32_t negative = 0, unsigned_ = 0;
    for (int j = 0; j < kLanes; j += 8) {
      uint32_t bits[8];
#pragma unroll
      for (int u = 0; u < 8; ++u) {
        const int64_t i = first + 32 * (j + u) + lane();
        bits[u] = i < n ? float_bits(__ldg(x + i)) : 1u;  // a positive value
      }
#pragma unroll
      for (int u = 0; u < 8; ++u) {
        const unsigned down = __ballot_sync(kAllLanes, bits[u] >> 31);
        const unsigned none = __ballot_sync(kAllLanes, (bits[u] & 0x7fffffffu) - 1u >= kInfBits);  // 0 wraps
        if (lane() == j + u) negative = down, unsigned_ = none;
      }
    }
    if (unsigned_) negative = (negative & ~unsigned_) | (coins(key, word) & unsigned_);
    store_word(packed, word, n, negative);
  }
}

// Addresses that a launch takes to the device.
constexpr int kVoteBatch = 256;
struct VoteBatch {
  int count;
  const uint8_t* of[kVoteBatch];
};

__global__ void signs_table_kernel(VoteBatch votes, const uint8_t** table) {
  if (int(threadIdx.x) < votes.count) table[threadIdx.x] = votes.of[threadIdx.x];
}

// Counters of set bits, bit-sliced: bit j of plane k has weight 2^k in the count of sign j. A full adder adds two votes
// to the lowest plane; its carries ripple through the others. voters < 2^kPlanes.
template <int kPlanes>
__global__ void __launch_bounds__(kBlock)
    signs_majority_kernel(const uint8_t* const* votes, int voters, int64_t n, uint64_t key, uint8_t* packed) {
  for (int64_t word = grid_thread(); 32 * word < n; word += grid_threads()) {
    uint32_t planes[kPlanes] = {};
    for (int v = 0; v < voters; v += 2) {
      const uint32_t a = load_word(votes[v], word, n), b = v + 1 < voters ? load_word(votes[v + 1], word, n) : 0u;
      const uint32_t differ = a ^ b;
      uint32_t carry = (a & b) | (planes[0] & differ);
      planes[0] ^= differ;
#pragma unroll
      for (int k = 1; k < kPlanes; ++k) {
        const uint32_t both = planes[k] & carry;
        planes[k] ^= carry;
        carry = both;
      }
    }
    // Bits of the counts above half of the voters; ties take a coin. Spare bits never tie.
    uint32_t won = 0, equal = ~0u;
#pragma unroll
    for (int k = kPlanes - 1; k >= 0; --k) {
      const uint32_t wanted = voters / 2 >> k & 1 ? ~0u : 0u;
      won |= equal & planes[k] & ~wanted;
      equal &= ~(planes[k] ^ wanted);
    }
    if (voters % 2 == 0 && equal) won |= equal & coins(key, word);
    store_word(packed, word, n, won);
  }
}

__global__ void __launch_bounds__(kBlock)
    signs_decode_add_kernel(const uint8_t* packed, int64_t n, float scale, float* out) {
  for (int64_t i = 4 * grid_thread(); i < n; i += 4 * grid_threads()) {
    const uint32_t bits = uint32_t(__ldg(packed + i / 8)) >> (i % 8);
    float value[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) value[j] = bits >> j & 1 ? -scale : scale;
    add4(out, i, n, value);
  }
}

}  // namespace gradzip::cuda
