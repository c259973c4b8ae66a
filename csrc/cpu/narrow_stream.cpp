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

// pext and pdep would do for eight codes at a time, but take up to hundreds of cycles before AMD's Zen 3.

// Joins pairs of codes, then pairs of these, then pairs of these again.
GZ_AVX2 void pack_avx2(const uint8_t* codes, int n, int bits, uint8_t* stream) {
  int i = 0;
  if (bits < 8) {  // as signed bytes, which one factor of the first product has to be
    const __m128i ones = _mm_set1_epi16(int16_t(1 | 1 << (8 + bits))), twos = _mm_set1_epi32(1 | 1 << (16 + 2 * bits));
    const __m128i up = _mm_setr_epi32(32 - 4 * bits, 0, 32 - 4 * bits, 0), down = _mm_cvtsi32_si128(32 - 4 * bits);
#pragma GCC unroll 4
    for (; n - i >= whole_word_codes(bits) + 8; i += 16, stream += 2 * bits) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i));
      const __m128i fours = _mm_madd_epi16(_mm_maddubs_epi16(ones, bytes), twos);
      const __m128i eights = _mm_srl_epi64(_mm_sllv_epi32(fours, up), down);
      _mm_storel_epi64(reinterpret_cast<__m128i*>(stream), eights);  // the excess is overwritten by the next store
      const int64_t second = _mm_extract_epi64(eights, 1);
      std::memcpy(stream + bits, &second, 8);
    }
  } else {
    std::memcpy(stream, codes, size_t(n));
    i = n;
  }
  pack_scalar(codes + i, n - i, bits, stream);
}

// For 16 codes, the two bytes that each begins in, and the factor that moves it to the highest bits of the two.
struct Places {
  uint8_t bytes[32] = {};
  uint16_t factor[16] = {};
  constexpr explicit Places(int bits) {
    for (int j = 0; j < 16; ++j) {
      const int first = j * bits / 8, skip = j * bits % 8;
      bytes[2 * j] = uint8_t(first);
      bytes[2 * j + 1] = uint8_t(first + 1);  // past the 16 bytes, it is no part of the code
      factor[j] = uint16_t(1 << (16 - bits - skip));
    }
  }
};
constexpr Places kPlaces[] = {Places(1), Places(2), Places(3), Places(4), Places(5), Places(6), Places(7), Places(8)};

// kBytes, 8 or 16, have 16 codes.
template <int kBytes>
GZ_AVX2 void unpack_from(const uint8_t* stream, int n, int bits, uint8_t* codes) {
  const Places& places = kPlaces[bits - 1];
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(places.bytes));
  const __m256i factor = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(places.factor));
  const __m128i down = _mm_cvtsi32_si128(16 - bits);
  int i = 0;
#pragma GCC unroll 4
  for (; (n - i) * bits >= 8 * kBytes; i += 16, stream += 2 * bits) {
    const auto* from = reinterpret_cast<const __m128i*>(stream);
    const __m256i both = _mm256_broadcastsi128_si256(kBytes == 8 ? _mm_loadl_epi64(from) : _mm_loadu_si128(from));
    const __m256i high = _mm256_mullo_epi16(_mm256_shuffle_epi8(both, bytes), factor);
    const __m256i words = _mm256_srl_epi16(high, down);
    const __m128i all = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), all);
  }
  unpack_scalar(stream, n - i, bits, codes + i);
}
GZ_AVX2 void unpack_avx2(const uint8_t* stream, int n, int bits, uint8_t* codes) {
  bits <= 4 ? unpack_from<8>(stream, n, bits, codes) : unpack_from<16>(stream, n, bits, codes);
}

void pack_avx512(const uint8_t* codes, int n, int bits, uint8_t* stream) { pack_avx2(codes, n, bits, stream); }
void unpack_avx512(const uint8_t* stream, int n, int bits, uint8_t* codes) { unpack_avx2(stream, n, bits, codes); }

GZ_SIMD_SELECT(void, pack, (const uint8_t* codes, int n, int bits, uint8_t* stream), (codes, n, bits, stream))
GZ_SIMD_SELECT(void, unpack, (const uint8_t* stream, int n, int bits, uint8_t* codes), (stream, n, bits, codes))

}  // namespace

void pack_narrow(const uint8_t* codes, int n, int bits, uint8_t* stream) { pack(codes, n, bits, stream); }
void unpack_narrow(const uint8_t* stream, int n, int bits, uint8_t* codes) { unpack(stream, n, bits, codes); }

}  // namespace gradzip::cpu
