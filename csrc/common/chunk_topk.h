// The largest numbers of each chunk of a gradient, with 2 bits each: a sign, and one of two levels that the numbers of a
// chunk share.
//
// A record is a word with the two levels, bfloat16, the higher one in the upper half, and then the codes, two bits each,
// padded with zeros to the words that k codes take: bit 0 picks the higher level, bit 1 is the sign. A level is the mean
// of the magnitudes that it stands for; the higher one stands for those above their mean. Sums are sums of integers, so
// their order does not matter, and the CPU and CUDA agree bit for bit.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "common/range_float.h"

namespace gradzip {

constexpr int kMostChunk = 4096;  // elements of a chunk, at most; a multiple of 32

// Chunks whose magnitudes are all smaller are encoded as if they reached this one, so that no quotient overflows.
constexpr float kLeastPeak = 0x1p-100f;

// Numbers kept of a chunk of `numel` elements, if k are kept of `chunk`; the last chunk may have fewer.
GZ_HD int64_t chunk_count(int64_t numel, int64_t chunk, int64_t k) { return (k * numel + chunk - 1) / chunk; }
GZ_HD int64_t chunk_words(int64_t count) { return 1 + (count + 15) / 16; }  // of a record
// Numbers kept of all n elements.
GZ_HD int64_t chunks_count(int64_t n, int64_t chunk, int64_t k) {
  return n / chunk * k + chunk_count(n % chunk, chunk, k);
}

// A vector whose k largest numbers of each chunk are kept, and where they go.
struct ChunkSource {
  const void* x;
  int64_t n, k;
  int32_t* indices;
  uint8_t* records;
};
static_assert(sizeof(ChunkSource) == 40, "gradzip/ops/groups.py writes it");

// The records of a vector, and where the values go.
struct ChunkRecords {
  const uint8_t* records;
  int64_t n, k;
  float* values;
};
static_assert(sizeof(ChunkRecords) == 32, "gradzip/ops/groups.py writes it");

// Magnitudes as integers from 0 to 2^20, which the largest one of the chunk is.
constexpr int kShareBits = 20;
struct ChunkUnit {
  float inverse, value;  // integers in 1; and the value of integer 1
};
GZ_HD ChunkUnit chunk_unit(uint32_t largest) {
  const float magnitude = bits_float(largest), peak = magnitude > kLeastPeak ? magnitude : kLeastPeak;
  return {float(1 << kShareBits) / peak, peak * (1.0f / float(1 << kShareBits))};
}
GZ_HD uint32_t chunk_share(uint32_t magnitude, ChunkUnit unit) {
  return uint32_t(bits_float(magnitude) * unit.inverse);
}
// Whether a number takes the higher level. sum: of the shares of all `count` numbers.
GZ_HD bool above_mean(uint32_t share, uint64_t sum, uint64_t count) { return share * count > sum; }

// A bfloat16, rounded to nearest, never up to infinity. x >= 0.
GZ_HD uint32_t to_bfloat16(float x) {
  const uint32_t rounded = (float_bits(x) + 0x8000u) >> 16;
  return rounded < 0x7f7fu ? rounded : 0x7f7fu;
}

// The word with the levels. sum, count: of all numbers; high_sum, high_count: of those above the mean. NaN, twice, if the
// chunk has a number that is not finite.
GZ_HD uint32_t chunk_levels(uint32_t largest, uint64_t sum, uint64_t count, uint64_t high_sum, uint64_t high_count) {
  if (largest >= kInfBits) return 0x7fc07fc0u;
  const float value = chunk_unit(largest).value;
  const uint32_t low = to_bfloat16(float(sum - high_sum) / float(count - high_count) * value);
  const uint32_t high = high_count > 0 ? to_bfloat16(float(high_sum) / float(high_count) * value) : low;
  return high << 16 | low;
}

GZ_HD float low_level(uint32_t levels) { return bits_float(levels << 16); }
GZ_HD float high_level(uint32_t levels) { return bits_float(levels & 0xffff0000u); }
// Whether an encoder can have written the levels of finite numbers.
GZ_HD bool valid_levels(uint32_t levels) { return (levels & 0xffffu) <= levels >> 16 && levels >> 16 < kInfBits >> 16; }
GZ_HD float chunk_value(uint32_t code, uint32_t levels) {
  const float level = code & 1u ? high_level(levels) : low_level(levels);
  return code & 2u ? -level : level;
}

}  // namespace gradzip
