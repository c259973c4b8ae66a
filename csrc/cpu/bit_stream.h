// Little-endian bit streams: code i occupies bits [i * bits, (i + 1) * bits).
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/vectors.h"

namespace gradzip::cpu {

// Codes packed at a time: a multiple of eight, which end on a whole byte.
constexpr int kBitBlock = 256;

// Packs n <= kBitBlock codes into ceil(n * bits / 8) bytes; nothing past them is written.
GZ_INLINE void pack_block(const uint32_t* codes, int n, int bits, uint8_t* out) {
  uint8_t stage[kBitBlock * 4 + 16];
  uint8_t* at = stage;
  int i = 0;
  // Eight at a time: pairs, then fours, which begin `bits` half bytes apart.
  if (bits <= 16) {
    using Words = Vector<uint64_t, 32>;
    const Words shift = uint64_t(2 * bits) * Words{0, 1, 0, 1};
    for (; i + 8 <= n; i += 8, at += bits) {
      const Words two = load<32>(reinterpret_cast<const uint64_t*>(codes + i));
      const Words pairs = ((two & 0xffffffffu) | two >> (32 - bits)) << shift;
      const Words fours = pairs | __builtin_shuffle(pairs, Words{1, 0, 3, 2});
      const uint64_t first = fours[0], second = fours[2];
      if (bits % 2 == 0) {
        std::memcpy(at, &first, 8);
        std::memcpy(at + bits / 2, &second, 8);
      } else {
        const unsigned __int128 all = first | static_cast<unsigned __int128>(second) << (4 * bits);
        std::memcpy(at, &all, 16);
      }
    }
  }
  uint64_t pending = 0;
  int filled = 0;
  for (; i < n; ++i) {
    pending |= uint64_t(codes[i]) << filled;
    filled += bits;
    for (; filled >= 8; filled -= 8, pending >>= 8) *at++ = uint8_t(pending);
  }
  if (filled) *at++ = uint8_t(pending);
  std::memcpy(out, stage, size_t(at - stage));
}

// At least 57 bits from position `bit` of a stream of nbytes bytes; bits past its end are 0.
GZ_INLINE uint64_t window(const uint8_t* stream, int64_t nbytes, int64_t bit) {
  const int64_t byte = bit / 8, left = nbytes - byte;
  uint64_t word = 0;
  if (__builtin_expect(left >= 8, 1))
    std::memcpy(&word, stream + byte, 8);
  else if (left > 0)
    std::memcpy(&word, stream + byte, size_t(left));
  return word >> (bit % 8);
}

// The first `bits` <= 57 of them.
GZ_INLINE uint64_t read_bits(const uint8_t* stream, int64_t nbytes, int64_t bit, int bits) {
  return window(stream, nbytes, bit) & ((uint64_t(1) << bits) - 1);
}

}  // namespace gradzip::cpu
