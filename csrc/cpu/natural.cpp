#include "common/natural.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "common/parts.h"
#include "cpu/abs_max.h"
#include "cpu/bit_stream.h"
#include "cpu/half.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/philox.h"
#include "cpu/simd.h"

namespace gradzip::cpu {
namespace {

GZ_INLINE void natural_codes_body(const float* x, const uint32_t* random, int n, uint16_t* codes) {
  for (int i = 0; i < n; ++i) codes[i] = uint16_t(natural_code(x[i], random[i]));
}
GZ_SIMD_DISPATCH(void, natural_codes, (const float* x, const uint32_t* random, int n, uint16_t* codes),
                 (x, random, n, codes))

// Packs n codes. Those from n to the next multiple of 8 are read, and 0.
void pack_codes_scalar(const uint16_t* codes, int n, uint8_t* packed) {
  for (int i = 0; i < n; i += 8, packed += kNaturalBits) {
    unsigned __int128 all = 0;
    for (int j = 0; j < 8; ++j) all |= static_cast<unsigned __int128>(codes[i + j]) << (kNaturalBits * j);
    std::memcpy(packed, &all, size_t(ceil_div(std::min(8, n - i) * kNaturalBits, 8)));
  }
}
// Joins pairs of codes, then pairs of these: pext would be slow before Zen 3.
GZ_AVX2 void pack_codes_avx2(const uint16_t* codes, int n, uint8_t* packed) {
  const __m128i pair = _mm_set1_epi32(1 | 1 << (16 + kNaturalBits));
  const __m128i up = _mm_setr_epi32(32 - 2 * kNaturalBits, 0, 32 - 2 * kNaturalBits, 0);
  int i = 0;
#pragma GCC unroll 4
  for (; i + 8 <= n; i += 8, packed += kNaturalBits) {
    const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i));
    const __m128i twos = _mm_sllv_epi32(_mm_madd_epi16(eight, pair), up);
    const __m128i fours = _mm_srli_epi64(twos, 32 - 2 * kNaturalBits);
    const uint64_t low = uint64_t(_mm_cvtsi128_si64(fours)), high = uint64_t(_mm_extract_epi64(fours, 1));
    const uint64_t first = low | high << (4 * kNaturalBits);
    std::memcpy(packed, &first, sizeof first);
    packed[sizeof first] = uint8_t(high >> (64 - 4 * kNaturalBits));
  }
  pack_codes_scalar(codes + i, n - i, packed);
}
void pack_codes_avx512(const uint16_t* codes, int n, uint8_t* packed) { pack_codes_avx2(codes, n, packed); }
GZ_SIMD_SELECT(void, pack_codes, (const uint16_t* codes, int n, uint8_t* packed), (codes, n, packed))

// Values of n <= kBitBlock codes. Eight at a time, which vectorises: code j of them begins at bit j of byte j.
GZ_INLINE void natural_values(const uint8_t* packed, int n, float* values) {
  for (; n > 0; n -= 8, packed += kNaturalBits, values += 8) {
    uint8_t last[kNaturalBits] = {};
    if (n < 8) std::memcpy(last, packed, size_t(n + 1));
    const uint8_t* from = n < 8 ? last : packed;
    uint32_t pairs[8];
    for (int j = 0; j < 8; ++j) pairs[j] = from[j] | uint32_t(from[j + 1]) << 8;
    for (int j = 0; j < 8; ++j) values[j] = natural_value(pairs[j], j);
  }
}

// out[i] += weight * the value of code i < n. Returns whether all codes are of finite numbers.
GZ_INLINE bool add_powers_body(const uint8_t* packed, int64_t n, float weight, float* out) {
  uint32_t invalid = 0;
  for (int64_t i = 0; i < n; i += kBitBlock) {
    const int count = int(std::min<int64_t>(n - i, kBitBlock));
    float values[kBitBlock];
    natural_values(packed + i / 8 * kNaturalBits, count, values);
    for (int j = 0; j < count; ++j) {
      invalid |= uint32_t(!valid_natural(values[j]));
      out[i + j] += weight * values[j];
    }
  }
  return invalid == 0;
}
bool add_powers_scalar(const uint8_t* packed, int64_t n, float weight, float* out) {
  return add_powers_body(packed, n, weight, out);
}
// A shuffle brings the two bytes of each code to the upper half of its lane.
GZ_AVX2 bool add_powers_avx2(const uint8_t* packed, int64_t n, float weight, float* out) {
  constexpr char kNo = -1;
  const __m256i bytes = _mm256_setr_epi8(kNo, kNo, 0, 1, kNo, kNo, 1, 2, kNo, kNo, 2, 3, kNo, kNo, 3, 4,  //
                                         kNo, kNo, 4, 5, kNo, kNo, 5, 6, kNo, kNo, 6, 7, kNo, kNo, 7, 8);
  const __m256i up = _mm256_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0), code = _mm256_set1_epi32(int(0xff800000u));
  const __m256 factor = _mm256_set1_ps(weight);
  __m256i most = _mm256_setzero_si256();  // exponents, in the highest bits
  int64_t i = 0;
  for (; i + 16 <= n; i += 8, packed += kNaturalBits) {  // 16 bytes are read: of the next eight codes, too
    const __m256i two = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(packed)));
    const __m256i value = _mm256_and_si256(_mm256_sllv_epi32(_mm256_shuffle_epi8(two, bytes), up), code);
    most = _mm256_max_epu32(most, _mm256_slli_epi32(value, 1));
    const __m256 term = _mm256_mul_ps(factor, _mm256_castsi256_ps(value));
    _mm256_storeu_ps(out + i, _mm256_add_ps(_mm256_loadu_ps(out + i), term));
  }
  const __m256i invalid = _mm256_cmpeq_epi32(_mm256_srli_epi32(most, 24), _mm256_set1_epi32(int(kNaturalInf)));
  const bool rest = add_powers_body(packed, n - i, weight, out + i);
  return rest && _mm256_testz_si256(invalid, invalid);
}
bool add_powers_avx512(const uint8_t* packed, int64_t n, float weight, float* out) {
  return add_powers_avx2(packed, n, weight, out);
}
GZ_SIMD_SELECT(bool, add_powers, (const uint8_t* packed, int64_t n, float weight, float* out), (packed, n, weight, out))

// Elements of `out` that stay in the L1 cache while all payloads are added to them.
constexpr int64_t kSumBlock = 1 << 12;

template <class T>
void encode(const T* x, const NaturalSource& of, const int64_t* replays, float* most, int threads) {
  const uint64_t key = replay_key(of.key, replays);
  uint8_t* const packed = of.packed;
  std::atomic<int64_t> largest{0};
  parallel_chunks(of.n, kChunk, threads, [&](int64_t, int64_t begin, int64_t end) {
    if (most) raise(&largest, int64_t(abs_max_here(x + begin, end - begin)));
    for (int64_t i = begin; i < end; i += kBitBlock) {
      const int count = int(std::min<int64_t>(end - i, kBitBlock));
      uint32_t random[kBitBlock];
      uint16_t codes[kBitBlock];
      float buffer[kBitBlock];
      philox_words(key, uint64_t(i), count, random);
      natural_codes(as_floats(x + i, count, buffer), random, count, codes);
      std::fill(codes + count, codes + ceil_div(count, 8) * 8, uint16_t(0));
      pack_codes(codes, count, packed + i / 8 * kNaturalBits);
    }
  });
  if (most) *most = bits_float(uint32_t(largest));
}

template <class T>
void decode_sum(const uint8_t* const* payloads, int64_t count, int64_t n, float weight, bool add, T* out,
                int32_t* failed, int threads) {
  std::atomic<int64_t> first_invalid{count};
  parallel_chunks(n, kChunk, threads, [&](int64_t, int64_t begin, int64_t end) {
    float buffer[kSumBlock];
    for (int64_t i = begin; i < end; i += kSumBlock) {
      const int64_t many = std::min(end - i, kSumBlock);
      float* const sum = room_for(out + i, buffer);
      if (!add) std::fill_n(sum, many, 0.0f);
      for (int64_t p = 0; p < count; ++p)
        if (!add_powers(payloads[p] + i / 8 * kNaturalBits, many, weight, sum)) lower(&first_invalid, p);
      write(sum, many, out + i);
    }
  });
  if (first_invalid < count) *failed = int32_t(first_invalid) + 1;
}

}  // namespace

void natural_encode(const NaturalSource* table, int64_t count, int dtype, const int64_t* replays, float* most,
                    int threads) {
  const auto size = [&](int64_t i) { return table[i].n; };
  parallel_pieces(count, threads, size, [&](int64_t i, int threads_of_one) {
    float* const own = most ? most + i : nullptr;
    typed(table[i].x, dtype, [&](auto* x) { encode(x, table[i], replays, own, threads_of_one); });
  });
}

void natural_decode_sum(const uint8_t* const* payloads, int64_t count, int64_t parts, int64_t n, float weight, bool add,
                        void* out, int dtype, int32_t* failed, int threads) {
  const Parts of = parts_of(n, parts);
  typed(out, dtype, [&](auto* to) {
    for (int64_t p = 0; p < parts; ++p) {
      int32_t of_part = 0;
      decode_sum(payloads + p * count, count, of.length(p), weight, add, to + of.begin(p), &of_part, threads);
      if (of_part && !*failed) *failed = int32_t(p * count) + of_part;
    }
  });
}

}  // namespace gradzip::cpu
