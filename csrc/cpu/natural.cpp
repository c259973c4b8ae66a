#include "common/natural.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "cpu/abs_max.h"
#include "cpu/bit_stream.h"
#include "cpu/half.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/philox.h"
#include "cpu/simd.h"

namespace gradzip::cpu {
namespace {

GZ_INLINE void natural_codes_body(const float* x, const uint32_t* random, int n, uint32_t* codes) {
  for (int i = 0; i < n; ++i) codes[i] = natural_code(x[i], random[i]);
}
GZ_SIMD_DISPATCH(void, natural_codes, (const float* x, const uint32_t* random, int n, uint32_t* codes),
                 (x, random, n, codes))

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
GZ_SIMD_DISPATCH(bool, add_powers, (const uint8_t* packed, int64_t n, float weight, float* out),
                 (packed, n, weight, out))

// Elements of `out` that stay in the L1 cache while all payloads are added to them.
constexpr int64_t kSumBlock = 1 << 12;

template <class T>
void encode(const T* x, int64_t n, uint64_t key, const int64_t* replays, uint8_t* packed, float* most, int threads) {
  key = replay_key(key, replays);
  std::vector<uint32_t> largest(size_t(ceil_div(n, kChunk)), 0);
  parallel_chunks(n, kChunk, threads, [&](int64_t chunk, int64_t begin, int64_t end) {
    if (most) largest[size_t(chunk)] = abs_max_here(x + begin, end - begin);
    for (int64_t i = begin; i < end; i += kBitBlock) {
      const int count = int(std::min<int64_t>(end - i, kBitBlock));
      uint32_t random[kBitBlock], codes[kBitBlock];
      float buffer[kBitBlock];
      philox_words(key, uint64_t(i), count, random);
      natural_codes(as_floats(x + i, count, buffer), random, count, codes);
      pack_block(codes, count, kNaturalBits, packed + i / 8 * kNaturalBits);
    }
  });
  if (most) *most = bits_float(n ? *std::max_element(largest.begin(), largest.end()) : 0u);
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

void natural_encode(const void* x, int dtype, int64_t n, uint64_t key, const int64_t* replays, uint8_t* packed,
                    float* most, int threads) {
  typed(x, dtype, [&](auto* of) { encode(of, n, key, replays, packed, most, threads); });
}

void natural_decode_sum(const uint8_t* const* payloads, int64_t count, int64_t n, float weight, bool add, void* out,
                        int dtype, int32_t* failed, int threads) {
  typed(out, dtype, [&](auto* to) { decode_sum(payloads, count, n, weight, add, to, failed, threads); });
}

}  // namespace gradzip::cpu
