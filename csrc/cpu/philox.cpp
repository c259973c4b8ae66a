#include "cpu/philox.h"

#include "cpu/simd.h"

namespace gradzip::cpu {
namespace {

void words_scalar(uint64_t key, uint64_t first, int count, uint32_t* words) {
  for (int j = 0; j < count; j += 4) {
    const Philox4 draw = philox(key, (first + uint64_t(j)) / 4);
    for (int k = 0; k < 4 && j + k < count; ++k) words[j + k] = draw.v[k];
  }
}

// The keys of the ten rounds, for counters of one upper half. Lower halves are all that differs in the first two rounds:
// of round 1, one product is the same for all counters, and is part of the keys of rounds 1 and 2.
struct RoundKeys {
  uint32_t k0[10], k1[10];
  RoundKeys(uint64_t key, uint32_t upper) {
    for (uint32_t round = 0; round < 10; ++round) {
      k0[round] = uint32_t(key) + round * 0x9E3779B9u;
      k1[round] = uint32_t(key >> 32) + round * 0xBB67AE85u;
    }
    const uint64_t product = uint64_t(0xD2511F53u) * (upper ^ k0[0]);
    k1[1] ^= uint32_t(product >> 32);
    k1[2] ^= uint32_t(product);
  }
};

// Whether the counters of [first, first + count) have one upper half.
bool one_upper(uint64_t first, int count) { return first >> 34 == (first + uint64_t(count)) >> 34; }

// The vector forms keep each of the four words in the low half of a 64-bit lane, one counter per lane: the multiplier
// reads low halves only, so the high halves hold anything: a shuffle moves high halves down, as multiplications and
// shifts would share one port. Lane 2m has the m-th counter of the first half, lane 2m +
// 1 that of the second, which unpacking puts in order.
GZ_AVX2 void words_avx2(uint64_t key, uint64_t first, int count, uint32_t* words) {
  if (!one_upper(first, count)) return words_scalar(key, first, count, words);
  const __m256i m0 = _mm256_set1_epi64x(0xD2511F53), m1 = _mm256_set1_epi64x(0xCD9E8D57);
  const RoundKeys keys(key, uint32_t(first >> 34));
  constexpr int kHighs = 0xf5;  // the odd words, twice
  constexpr int kAbreast = 2;   // independent registers of counters, to hide the latency of multiplications
  int j = 0;
  for (; j + 16 * kAbreast <= count; j += 16 * kAbreast) {
    __m256i c0[kAbreast], c1[kAbreast], c2[kAbreast], c3[kAbreast];
    for (int i = 0; i < kAbreast; ++i) {
      const __m256i counters = _mm256_add_epi64(_mm256_set1_epi64x(int64_t((first + uint64_t(j)) / 4) + 4 * i),
                                                _mm256_set_epi64x(3, 1, 2, 0));
      const __m256i a = _mm256_mul_epu32(counters, m0);
      const __m256i k = _mm256_set1_epi32(int(keys.k1[0]));
      const __m256i b = _mm256_mul_epu32(_mm256_xor_si256(_mm256_shuffle_epi32(a, kHighs), k), m1);
      c0[i] = _mm256_xor_si256(_mm256_shuffle_epi32(b, kHighs), _mm256_set1_epi32(int(keys.k0[1])));
      c1[i] = b;
      c2[i] = _mm256_xor_si256(a, _mm256_set1_epi32(int(keys.k1[1])));
      c3[i] = _mm256_setzero_si256();
    }
    for (int round = 2; round < 10; ++round) {
      const __m256i k0 = _mm256_set1_epi32(int(keys.k0[round])), k1 = _mm256_set1_epi32(int(keys.k1[round]));
      for (int i = 0; i < kAbreast; ++i) {
        const __m256i a = _mm256_mul_epu32(c0[i], m0), b = _mm256_mul_epu32(c2[i], m1);
        c0[i] = _mm256_xor_si256(_mm256_shuffle_epi32(b, kHighs), _mm256_xor_si256(c1[i], k0));
        c2[i] = _mm256_xor_si256(_mm256_shuffle_epi32(a, kHighs), _mm256_xor_si256(c3[i], k1));
        c1[i] = b;
        c3[i] = a;
      }
    }
    for (int i = 0; i < kAbreast; ++i) {
      const __m256i low = _mm256_blend_epi32(c0[i], _mm256_slli_epi64(c1[i], 32), 0xaa);
      const __m256i high = _mm256_blend_epi32(c2[i], _mm256_slli_epi64(c3[i], 32), 0xaa);
      uint32_t* to = words + j + 16 * i;
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_unpacklo_epi64(low, high));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8), _mm256_unpackhi_epi64(low, high));
    }
  }
  _mm256_zeroupper();  // g++ omits it before a tail call: SSE code that follows would run several times slower
  words_scalar(key, first + uint64_t(j), count - j, words + j);
}

GZ_AVX512 void words_avx512(uint64_t key, uint64_t first, int count, uint32_t* words) {
  if (!one_upper(first, count)) return words_scalar(key, first, count, words);
  const __m512i m0 = _mm512_set1_epi64(0xD2511F53), m1 = _mm512_set1_epi64(0xCD9E8D57);
  const RoundKeys keys(key, uint32_t(first >> 34));
  constexpr int kXor3 = 0x96;
  constexpr auto kHighs = _MM_PERM_ENUM(0xf5);
  constexpr int kAbreast = 4;
  int j = 0;
  for (; j + 32 * kAbreast <= count; j += 32 * kAbreast) {
    __m512i c0[kAbreast], c1[kAbreast], c2[kAbreast], c3[kAbreast];
    for (int i = 0; i < kAbreast; ++i) {
      const __m512i counters = _mm512_add_epi64(_mm512_set1_epi64(int64_t((first + uint64_t(j)) / 4) + 8 * i),
                                                _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0));
      const __m512i a = _mm512_mul_epu32(counters, m0);
      const __m512i k = _mm512_set1_epi32(int(keys.k1[0]));
      const __m512i b = _mm512_mul_epu32(_mm512_xor_si512(_mm512_shuffle_epi32(a, kHighs), k), m1);
      c0[i] = _mm512_xor_si512(_mm512_shuffle_epi32(b, kHighs), _mm512_set1_epi32(int(keys.k0[1])));
      c1[i] = b;
      c2[i] = _mm512_xor_si512(a, _mm512_set1_epi32(int(keys.k1[1])));
      c3[i] = _mm512_setzero_si512();
    }
    for (int round = 2; round < 10; ++round) {
      const __m512i k0 = _mm512_set1_epi32(int(keys.k0[round])), k1 = _mm512_set1_epi32(int(keys.k1[round]));
      for (int i = 0; i < kAbreast; ++i) {
        const __m512i a = _mm512_mul_epu32(c0[i], m0), b = _mm512_mul_epu32(c2[i], m1);
        c0[i] = _mm512_ternarylogic_epi32(_mm512_shuffle_epi32(b, kHighs), c1[i], k0, kXor3);
        c2[i] = _mm512_ternarylogic_epi32(_mm512_shuffle_epi32(a, kHighs), c3[i], k1, kXor3);
        c1[i] = b;
        c3[i] = a;
      }
    }
    for (int i = 0; i < kAbreast; ++i) {
      const __m512i low = _mm512_mask_blend_epi32(0xaaaa, c0[i], _mm512_slli_epi64(c1[i], 32));
      const __m512i high = _mm512_mask_blend_epi32(0xaaaa, c2[i], _mm512_slli_epi64(c3[i], 32));
      _mm512_storeu_si512(words + j + 32 * i, _mm512_unpacklo_epi64(low, high));
      _mm512_storeu_si512(words + j + 32 * i + 16, _mm512_unpackhi_epi64(low, high));
    }
  }
  _mm256_zeroupper();  // g++ omits it before a tail call: SSE code that follows would run several times slower
  words_scalar(key, first + uint64_t(j), count - j, words + j);
}

GZ_SIMD_SELECT(void, words, (uint64_t key, uint64_t first, int count, uint32_t* words), (key, first, count, words))

}  // namespace

void philox_words(uint64_t key, uint64_t first, int count, uint32_t* out) { words(key, first, count, out); }

}  // namespace gradzip::cpu
