// Status bitmaps shared by the primitives that walk one.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu/simd.h"

namespace gradzip::cpu {

// Where each chunk (kChunk bits) of the bitmap begins among the set bits; one more entry with their number.
std::vector<int64_t> bitmap_offsets(const uint8_t* bitmap, int64_t n, int threads);

// Bits [i, i + 64) of a bitmap of n, those past n as 0. Reads no byte past bit n.
GZ_INLINE uint64_t load_word(const uint8_t* bitmap, int64_t i, int64_t n) {
  uint64_t word = 0;
  const int64_t bytes = (n - i + 7) / 8;
  std::memcpy(&word, bitmap + i / 8, bytes < 8 ? size_t(bytes) : 8);
  return n - i < 64 ? word & ((uint64_t(1) << (n - i)) - 1) : word;
}

}  // namespace gradzip::cpu
