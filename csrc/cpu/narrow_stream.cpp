#include "cpu/narrow_stream.h"

#include <cstring>

#include "cpu/simd.h"

namespace gradzip::cpu {
namespace {

// The least number of codes left for which an 8-byte load or store stays within the stream.
GZ_INLINE int whole_word_codes(int bits) { return 64 / bits + 8; }

void pack_scalar(const uint8_t* codes, int n, int bits, uint8_t* stream) {
  for (int i = 0; i < n; i += 8, stream += bits) {
    const int count = n - i < 8 ? n - i : 8;
    uint64_t word = 0;
    for (int j = 0; j < count; ++j) word |= uint64_t(codes[i + j]) << (j * bits);
    std::memcpy(stream, &word, size_t((count * bits + 7) / 8));
  }
}

void unpack_scalar(const uint8_t* stream, int n, int bits, uint8_t* codes) {
  const uint64_t mask = (1u << bits) - 1;
  for (int i = 0; i < n; i += 8, stream += bits) {
    const int count = n - i < 8 ? n - i : 8;
    uint64_t word = 0;
    std::memcpy(&word, stream, size_t((count * bits + 7) / 8));
    for (int j = 0; j < 8; ++j) codes[i + j] = uint8_t(word >> (j * bits) & mask);
  }
}

// pext gathers the low bits of eight bytes, pdep spreads them out again.
GZ_AVX2 void pack_avx2(const uint8_t* codes, int n, int bits, uint8_t* stream) {
  const uint64_t low = 0x0101010101010101ull * ((1u << bits) - 1);
  int i = 0;
#pragma GCC unroll 4
  for (; n - i >= whole_word_codes(bits); i += 8, stream += bits) {
    uint64_t bytes;
    std::memcpy(&bytes, codes + i, 8);
    const uint64_t word = _pext_u64(bytes, low);
    std::memcpy(stream, &word, 8);  // the excess is overwritten by the next store
  }
  pack_scalar(codes + i, n - i, bits, stream);
}

GZ_AVX2 void unpack_avx2(const uint8_t* stream, int n, int bits, uint8_t* codes) {
  const uint64_t low = 0x0101010101010101ull * ((1u << bits) - 1);
  int i = 0;
#pragma GCC unroll 4
  for (; n - i >= whole_word_codes(bits); i += 8, stream += bits) {
    uint64_t word;
    std::memcpy(&word, stream, 8);
    const uint64_t bytes = _pdep_u64(word, low);
    std::memcpy(codes + i, &bytes, 8);
  }
  unpack_scalar(stream, n - i, bits, codes + i);
}

void pack_avx512(const uint8_t* codes, int n, int bits, uint8_t* stream) { pack_avx2(codes, n, bits, stream); }
void unpack_avx512(const uint8_t* stream, int n, int bits, uint8_t* codes) { unpack_avx2(stream, n, bits, codes); }

GZ_SIMD_SELECT(void, pack, (const uint8_t* codes, int n, int bits, uint8_t* stream), (codes, n, bits, stream))
GZ_SIMD_SELECT(void, unpack, (const uint8_t* stream, int n, int bits, uint8_t* codes), (stream, n, bits, codes))

}  // namespace

void pack_narrow(const uint8_t* codes, int n, int bits, uint8_t* stream) { pack(codes, n, bits, stream); }
void unpack_narrow(const uint8_t* stream, int n, int bits, uint8_t* codes) { unpack(stream, n, bits, codes); }

}  // namespace gradzip::cpu
