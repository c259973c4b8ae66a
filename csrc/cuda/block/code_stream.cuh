// Codes of a little-endian bit stream that threads read in any order.
#pragma once

#include "cuda/block/block.cuh"

namespace gradzip::cuda {

// `bits` <= 32 bits from position `bit` of a stream of nbytes bytes: few instructions, for what is rare.
GZ_DEVICE uint32_t read_bits_bytewise(const uint8_t* stream, int64_t nbytes, int64_t bit, int bits) {
  uint64_t word = 0;
#pragma unroll 1
  for (int b = 0; b < 5 && bit / 8 + b < nbytes; ++b) word |= uint64_t(stream[bit / 8 + b]) << (8 * b);
  return uint32_t(word >> bit % 8) & (bits == 32 ? ~0u : (1u << bits) - 1);
}

// Codes of a stream of nbytes bytes, from code `begin` on.
struct CodeStream {
  const uint8_t* stream;
  int64_t nbytes, begin;
  int bits, skip;
  const uint32_t* words;  // the aligned word with the first bit, `skip` bits before it

  GZ_DEVICE CodeStream(const uint8_t* stream, int64_t nbytes, int bits, int64_t begin)
      : stream(stream), nbytes(nbytes), begin(begin), bits(bits) {
    const int64_t bit = begin * bits;
    const int over = int((reinterpret_cast<uintptr_t>(stream) + uintptr_t(bit / 8)) % 4);
    words = reinterpret_cast<const uint32_t*>(stream + (bit / 8 - over));
    skip = int(bit % 8) + 8 * over;
  }
  // Whether the words with the first `count` codes, and the word after them, are in the stream.
  GZ_DEVICE bool inside(uint32_t count) const {
    const uint8_t* first = reinterpret_cast<const uint8_t*>(words);
    return first >= stream && first + 8 + (uint32_t(skip) + count * uint32_t(bits)) / 32 * 4 <= stream + nbytes;
  }
  // Code j < count, if they are.
  GZ_DEVICE uint32_t read_inside(uint32_t j) const {
    const uint32_t bit = uint32_t(skip) + j * uint32_t(bits);
    const uint64_t word = __ldg(words + bit / 32) | uint64_t(__ldg(words + bit / 32 + 1)) << 32;
    return uint32_t(word >> bit % 32) & ((1u << bits) - 1);
  }
  GZ_DEVICE uint32_t read(uint32_t j) const { return read_bits_bytewise(stream, nbytes, (begin + j) * bits, bits); }
};

}  // namespace gradzip::cuda
