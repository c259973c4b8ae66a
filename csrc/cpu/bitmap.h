// Iteration over status bitmaps.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu/simd.h"

namespace gradzip::cpu {

// The number of bits set before each chunk (kChunk bits) of the bitmap; the last entry is the total.
std::vector<int64_t> bitmap_offsets(const uint8_t* bitmap, int64_t n, int threads);

// Indices of the set bits, and, unless x is null, the values of x there. offsets: as above.
void walk_bitmap(const uint8_t* bitmap, int64_t n, const std::vector<int64_t>& offsets, const float* x,
                 int32_t* indices, float* values, int threads);

// Bits [i, i + 64) of a bitmap of n bits; bits past n are 0. Reads no byte past bit n.
GZ_INLINE uint64_t load_word(const uint8_t* bitmap, int64_t i, int64_t n) {
  uint64_t word = 0;
  const int64_t bytes = (n - i + 7) / 8;
  std::memcpy(&word, bitmap + i / 8, bytes < 8 ? size_t(bytes) : 8);
  return n - i < 64 ? word & ((uint64_t(1) << (n - i)) - 1) : word;
}

// Bits per call of set_bits, and room for the positions it finds.
constexpr int64_t kBitRun = 2048;
struct BitRun {
  int32_t at[kBitRun + 4];
};

// Positions of the set bits of [first, first + kBitRun) below n; returns their number. Most words of a sparse bitmap
// have few bits or none: four positions are always written, since a mispredicted branch costs more.
GZ_INLINE int64_t set_bits(const uint8_t* bitmap, int64_t first, int64_t n, BitRun& run) {
  const int64_t end = first + kBitRun < n ? first + kBitRun : n;
  int64_t found = 0;
  for (int64_t i = first; i < end; i += 64) {
    uint64_t word = load_word(bitmap, i, end);
    const int count = __builtin_popcountll(word);
    for (int j = 0; j < 4; ++j, word &= word - 1) run.at[found + j] = int32_t(i) + (word ? __builtin_ctzll(word) : 64);
    if (__builtin_expect(count > 4, 0))
      for (int j = 4; j < count; ++j, word &= word - 1) run.at[found + j] = int32_t(i) + __builtin_ctzll(word);
    found += count;
  }
  return found;
}

}  // namespace gradzip::cpu
