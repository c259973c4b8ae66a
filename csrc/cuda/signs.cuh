// One bit per sign, the majority vote, and decoding: for all tensors of a table in one launch. A warp takes 1024 signs at
// a time, a lane keeps one word of 32.
#pragma once

#include "common/philox.h"
#include "common/signs.h"
#include "cuda/block/bitmap_tiles.cuh"
#include "cuda/block/quads.cuh"
#include "cuda/block/table.cuh"
#include "cuda/block/teams.cuh"

namespace gradzip::cuda {

// Coins of the 32 elements from 32 * word on: draw number `word` of the key.
GZ_DEVICE uint32_t coins(uint64_t key, int64_t word) {
  const Philox4 draw = philox(key, uint64_t(word) / 4);
  const uint32_t low = word & 1 ? draw.v[1] : draw.v[0], high = word & 1 ? draw.v[3] : draw.v[2];
  return word & 2 ? high : low;
}

constexpr int64_t kSignsTile = kBlock / kLanes * kSumSegment;  // elements of a block; a warp takes a segment
struct SignsPackEntry {
  SignsSource source;
  int64_t first_block, first_segment;
};

// Packs the signs. Unless `parts` is null, writes the part of each segment, summed in the order of common/sums.h.
__global__ void __launch_bounds__(kBlock)
    signs_pack_kernel(const SignsPackEntry* entries, int64_t count, const int64_t* replays, SignsPart* parts) {
  const SignsPackEntry entry = entries[entry_of_block(entries, count)];
  const auto [x, dtype, n, key, packed] = entry.source;
  const int64_t segment = (blockIdx.x - entry.first_block) * (kBlock / kLanes) + warp();
  const int64_t end = n < (segment + 1) * kSumSegment ? n : (segment + 1) * kSumSegment;
  if (segment * kSumSegment >= n) return;
  double total = 0.0;
  uint32_t most = 0;
  for (int64_t first = segment * kSumSegment; first < end; first += kWarpBits) {
    uint32_t negative = 0, unsigned_ = 0;
    for (int j = 0; j < kLanes; j += 8) {
      uint32_t bits[8];
      typed_in(x, dtype, [&, n = n](auto* from) {
#pragma unroll
        for (int u = 0; u < 8; ++u) {
          const int64_t i = first + 32 * (j + u) + lane();
          bits[u] = i < n ? float_bits(load1(from + i)) : 0u;
        }
      });
#pragma unroll
      for (int u = 0; u < 8; ++u) {
        const uint32_t size = bits[u] & 0x7fffffffu;
        const unsigned down = __ballot_sync(kAllLanes, bits[u] >> 31);
        const unsigned none = __ballot_sync(kAllLanes, size - 1u >= kInfBits);  // 0 wraps
        if (lane() == j + u) negative = down, unsigned_ = none;
        if (parts) {
          // The lower half of the warp are the lanes of the sum.
          const float value = finite_magnitude(bits_float(bits[u]));
          const float next = __shfl_xor_sync(kAllLanes, value, kTeam);
          total += double(value);
          total += double(next);
          most = most > size ? most : size;
        }
      }
    }
    const int64_t word = first / 32 + lane(), left = n - 32 * word;
    if (left < 32) unsigned_ &= left > 0 ? (1u << left) - 1 : 0u;
    if (unsigned_) negative = (negative & ~unsigned_) | (coins(replay_key(key, replays), word) & unsigned_);
    store_word(packed, word, n, negative);
  }
  if (!parts) return;
  const SignsPart part{team_sum(total), warp_max(most)};
  if (lane() == 0) parts[entry.first_segment + segment] = part;
}

// Adds the parts of each tensor, in order. One warp per tensor.
__global__ void __launch_bounds__(kBlock)
    signs_statistics_kernel(const SignsPackEntry* entries, int64_t count, const SignsPart* parts, float* statistics) {
  for (int64_t e = grid_thread() / kLanes; e < count; e += grid_threads() / kLanes) {
    const int64_t n = entries[e].source.n, segments = (n + kSumSegment - 1) / kSumSegment;
    SignsPart all{0.0, 0u};
    for (int64_t first = 0; first < segments; first += kLanes) {
      SignsPart mine{0.0, 0u};
      if (first + lane() < segments) mine = parts[entries[e].first_segment + first + lane()];
#pragma unroll 8
      for (int j = 0; j < kLanes; ++j) all.total += __shfl_sync(kAllLanes, mine.total, j);
      all.most = all.most > mine.most ? all.most : mine.most;
    }
    all.most = warp_max(all.most);
    if (lane() == 0) signs_statistics(all, n, statistics + 2 * e);
  }
}

constexpr int kVoteWords = 4;  // of a thread
constexpr int64_t kVoteTile = int64_t(kBlock) * kVoteWords * 32;  // elements of a block
struct SignsVoteEntry {
  SignsVote vote;
  int64_t first_block;
};

// Counters of set bits, bit-sliced: bit j of plane k has weight 2^k in the count of sign j. A full adder adds two votes
// to the lowest plane; its carries ripple through the others. voters < 2^kPlanes.
template <int kPlanes>
GZ_DEVICE uint32_t majority_of(const uint8_t* const* votes, int voters, int64_t word, int64_t n, uint64_t key) {
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
  return won;
}

// against[voter], 0 at launch, counts the signs on which a voter was outvoted, unless it is null.
template <int kPlanes>
__global__ void __launch_bounds__(kBlock)
    signs_majority_kernel(const SignsVoteEntry* entries, int64_t count, const uint8_t* const* votes, int voters,
                          const int64_t* replays, int64_t* against) {
  const int64_t e = entry_of_block(entries, count);
  const SignsVoteEntry entry = entries[e];
  const auto [n, own_key, packed] = entry.vote;
  const uint64_t key = replay_key(own_key, replays);
  votes += e * voters;
  const int64_t first = (blockIdx.x - entry.first_block) * (kVoteTile / 32) + threadIdx.x;
  uint32_t won[kVoteWords];
#pragma unroll
  for (int w = 0; w < kVoteWords; ++w) {
    const int64_t word = first + w * kBlock;
    won[w] = 32 * word < n ? majority_of<kPlanes>(votes, voters, word, n, key) : 0u;
    store_word(packed, word, n, won[w]);
  }
  if (!against) return;
  for (int v = 0; v < voters; ++v) {
    int outvoted = 0;
#pragma unroll
    for (int w = 0; w < kVoteWords; ++w) outvoted += __popc(load_word(votes[v], first + w * kBlock, n) ^ won[w]);
    outvoted = warp_sum(outvoted);
    if (lane() == 0 && outvoted > 0) atomic_add(against + e * voters + v, int64_t(outvoted));
  }
}

// A lane loads the word of 32 signs, then takes four neighbouring elements of each 128. It reads the word twice, so that
// sums of half of them take few registers.
__global__ void __launch_bounds__(kBlock)
    signs_decode_add_kernel(const WeightedSumEntry* entries, int64_t count, const SignsTerm* terms) {
  constexpr int kQuads = int(kWarpBits / (4 * kLanes)), kTogether = kQuads / 2;
  const WeightedSumEntry entry = entries[entry_of_block(entries, count)];
  const auto [out, n, own_terms, add, dtype] = entry.sum;
  const int64_t tile = blockIdx.x - entry.first_block, begin = tile * kTile + warp() * kWarpBits + 4 * lane();
#pragma unroll 1
  for (int half = 0; half < kQuads; half += kTogether) {
    const int64_t first = begin + 4 * kLanes * half;
    float sum[kTogether][4] = {};
    if (add) {
#pragma unroll
      for (int q = 0; q < kTogether; ++q) load4_changing(static_cast<float*>(out), first + 4 * kLanes * q, n, sum[q]);
    }
    for (int64_t t = entry.first_term; t < entry.first_term + own_terms; ++t) {
      const float scale = signs_value(terms[t]);
      const uint32_t word = load_word(terms[t].packed, tile_word(tile), n);
#pragma unroll
      for (int q = 0; q < kTogether; ++q) {
        const uint32_t bits = __shfl_sync(kAllLanes, word, 4 * (half + q) + lane() / 8) >> (lane() % 8 * 4);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[q][j] += bits >> j & 1 ? -scale : scale;
      }
    }
    typed_out(out, dtype, [&, n = n](auto* to) {
#pragma unroll
      for (int q = 0; q < kTogether; ++q) store4(to, first + 4 * kLanes * q, n, sum[q]);
    });
  }
}

}  // namespace gradzip::cuda
