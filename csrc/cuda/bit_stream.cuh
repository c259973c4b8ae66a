// Little-endian bit streams, at any byte address: code i occupies bits [i * bits, (i + 1) * bits).
#pragma once

#include "cuda/block.cuh"

namespace gradzip::cuda {

// Codes a block packs at a time. Eight codes end on a whole byte, so tiles do not share one.
constexpr int kPackTile = 4 * kBlock;

// 32 bits from position `bit` >= 0 of the stream of `count` codes; bits past its end are 0.
GZ_DEVICE uint32_t stream_word(const uint32_t* codes, int count, int bits, int bit) {
  int i = bit / bits;
  const int skipped = bit - i * bits;
  uint32_t word = i < count ? codes[i] >> skipped : 0;
  for (int filled = bits - skipped; filled < 32 && ++i < count; filled += bits) word |= codes[i] << filled;
  return word;
}

// The block packs `count` codes of shared memory, each below 2^bits, into nbytes bytes; nothing past them is written.
// Words are aligned in memory, so only the first and last are written bytewise.
GZ_DEVICE void pack_bytes(const uint32_t* codes, int count, int bits, int nbytes, uint8_t* out) {
  const int skew = int(reinterpret_cast<uintptr_t>(out) % 4);
  for (int first = 4 * int(threadIdx.x) - skew; first < nbytes; first += 4 * int(blockDim.x)) {
    if (first >= 0 && first + 4 <= nbytes) {
      *reinterpret_cast<uint32_t*>(out + first) = stream_word(codes, count, bits, 8 * first);
    } else {
      for (int b = first < 0 ? 0 : first; b < first + 4 && b < nbytes; ++b)
        out[b] = uint8_t(stream_word(codes, count, bits, 8 * b));
    }
  }
}

GZ_DEVICE void pack_tile(const uint32_t* codes, int count, int bits, uint8_t* out) {
  pack_bytes(codes, count, bits, (count * bits + 7) / 8, out);
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
