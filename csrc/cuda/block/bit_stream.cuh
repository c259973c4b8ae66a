// Little-endian bit streams, at any byte address: code i occupies bits [i * bits, (i + 1) * bits).
#pragma once

#include "cuda/block/block.cuh"

namespace gradzip::cuda {

// Codes a block packs at a time. Eight codes end on a whole byte, so tiles do not share one.
constexpr int kPackTile = 4 * kBlock;

// The number of bits of a code, 1 to 32. A kernel makes one before it packs tiles.
struct CodeWidth {
  int bits;
  uint32_t reciprocal;  // ceil(2^31 / bits)

  explicit GZ_DEVICE CodeWidth(int bits) : bits(bits), reciprocal(((1u << 31) + uint32_t(bits) - 1) / uint32_t(bits)) {}
  // The code that bit `bit` < 2^26 belongs to, bit / bits, without a division, which takes some 20 instructions. Exact:
  // the reciprocal is too large by less than 1, so the quotient by less than 2^26 / 2^31 = 1 / 32 <= 1 / bits.
  GZ_DEVICE int code_of(int bit) const { return int(uint64_t(2 * uint32_t(bit)) * reciprocal >> 32); }
};

// 32 bits from position `bit` >= 0 of the stream of `count` codes; bits past its end are 0.
GZ_DEVICE uint32_t stream_word(const uint32_t* codes, int count, const CodeWidth& width, int bit) {
  const int bits = width.bits;
  int i = width.code_of(bit);
  const int skipped = bit - i * bits;
  uint32_t word = i < count ? codes[i] >> skipped : 0;
  for (int filled = bits - skipped; filled < 32 && ++i < count; filled += bits) word |= codes[i] << filled;
  return word;
}

// The block packs `count` codes of shared memory, each below 2^bits, into nbytes bytes; nothing past them is written.
// Words are aligned in memory, so only the first and last are written bytewise.
GZ_DEVICE void pack_bytes(const uint32_t* codes, int count, const CodeWidth& width, int nbytes, uint8_t* out) {
  const int skew = int(reinterpret_cast<uintptr_t>(out) % 4);
  for (int first = 4 * int(threadIdx.x) - skew; first < nbytes; first += 4 * int(blockDim.x)) {
    if (first >= 0 && first + 4 <= nbytes) {
      *reinterpret_cast<uint32_t*>(out + first) = stream_word(codes, count, width, 8 * first);
    } else {
      for (int b = first < 0 ? 0 : first; b < first + 4 && b < nbytes; ++b)
        out[b] = uint8_t(stream_word(codes, count, width, 8 * b));
    }
  }
}

GZ_DEVICE void pack_tile(const uint32_t* codes, int count, const CodeWidth& width, uint8_t* out) {
  pack_bytes(codes, count, width, (count * width.bits + 7) / 8, out);
}

// Bytes [at, at + 4) of a stream; bytes past its end are 0.
GZ_DEVICE uint32_t stream_bytes(const uint8_t* stream, int64_t nbytes, int64_t at) {
  if (at + 4 <= nbytes) return __ldg(reinterpret_cast<const uint32_t*>(stream + at));
  uint32_t word = 0;
  for (int b = 0; at + b < nbytes; ++b) word |= uint32_t(stream[at + b]) << (8 * b);
  return word;
}

// `bits` <= 32 bits from position `bit` of a stream of nbytes bytes; bits past its end are 0.
GZ_DEVICE uint32_t read_bits(const uint8_t* stream, int64_t nbytes, int64_t bit, int bits) {
  int64_t at = bit / 8;
  int skip = int(bit % 8);
  uint64_t word;
  const int over = int((reinterpret_cast<uintptr_t>(stream) + uintptr_t(at)) % 4);
  if (at >= over) {  // two aligned loads
    at -= over;
    skip += 8 * over;
    word = stream_bytes(stream, nbytes, at);
    if (skip + bits > 32) word |= uint64_t(stream_bytes(stream, nbytes, at + 4)) << 32;
  } else {
    word = 0;
    for (int b = 0; b < 5 && at + b < nbytes; ++b) word |= uint64_t(stream[at + b]) << (8 * b);
  }
  return uint32_t(word >> skip) & (bits == 32 ? ~0u : (1u << bits) - 1);
}

}  // namespace gradzip::cuda
