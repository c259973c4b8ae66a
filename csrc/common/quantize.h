// Stochastic quantization (QSGD: Alistarh et al., NeurIPS 2017, section 3.1; with one level it is TernGrad: Wen et al.,
// NeurIPS 2017). The same functions run on the CPU and in CUDA kernels: plain float32 operations in a fixed order, so
// levels agree bit for bit.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "common/range_float.h"

namespace gradzip {

enum class Norm : int { l2 = 0, max = 1, l1 = 2 };  // quantizers take the first two

// Rounded to float32: a norm is at least each of the magnitudes, and at most the largest float.
GZ_HD float norm_value(double norm) {
  constexpr double kLargest = 0x1.fffffep127;
  return float(norm < kLargest ? norm : kLargest);
}
GZ_HD bool valid_norm(float norm) { return norm >= 0.0f && float_bits(norm) != kInfBits; }

// Signed levels of `bits` bits, sign included: -s..s.
GZ_HD int32_t top_level(int bits) { return (1 << (bits - 1)) - 1; }

// |x| as a finite number: NaN is 0, infinity the largest float.
GZ_HD float finite_magnitude(float x) {
  uint32_t u = float_bits(x) & 0x7fffffffu;
  u = u > kInfBits ? 0u : u;
  return bits_float(u < kMaxFiniteBits ? u : kMaxFiniteBits);
}

// s |x| / norm as two multiplications. `range`, a power of two, keeps tiny and huge norms from making `factor`
// overflow or lose bits. Norm 0 gives 0.
struct LevelScale {
  float range, factor;
};
GZ_HD LevelScale level_scale(float norm, int32_t s) {
  if (!(norm > 0.0f)) return {0.0f, 0.0f};
  const float range = norm < 0x1p-64f ? 0x1p100f : norm > 0x1p64f ? 0x1p-100f : 1.0f;
  return {range, float(s) / (norm * range)};
}

// floor(t + u) for t = s |x| / norm, u uniform in [0, 1): t's integer part, and one more with the probability of its
// fraction. Both parts are exact, so only the 24 bits of u limit how unbiased the level is.
GZ_HD int32_t stochastic_level(float magnitude, LevelScale scale, int32_t s, uint32_t random) {
  float t = magnitude * scale.range * scale.factor;
  t = t < float(s) ? t : float(s);
  const int32_t whole = int32_t(t);
  const float fraction = (t - float(whole)) * 0x1p24f;
  return whole + int32_t(float(int32_t(random >> 8)) < fraction);
}

// Sign and magnitude in `bits` bits: the sign is the top bit, zero has none. Every bit pattern is a level in -s..s.
GZ_HD uint32_t level_code(int32_t level, bool negative, int bits) {
  return uint32_t(level) | uint32_t(negative && level) << (bits - 1);
}
GZ_HD int32_t code_level(uint32_t code, int bits) {
  const int32_t level = int32_t(code & uint32_t(top_level(bits)));
  return code >> (bits - 1) ? -level : level;
}

// A vector, and where the norms of its buckets go.
struct NormsSource {
  const void* x;
  int64_t n;
  float* norms;
};

// A vector to quantize, and where its packed levels and the norms of its buckets go.
struct QuantizeSource {
  const void* x;
  int64_t n;
  uint64_t key;
  uint8_t* packed;
  float* norms;
};
static_assert(sizeof(QuantizeSource) == 40, "gradzip/ops/groups.py writes it");

// Packed levels of a tensor, and the norms of its buckets.
struct QuantizedTerm {
  const uint8_t* packed;
  const float* norms;
};
static_assert(sizeof(QuantizedTerm) == 16, "gradzip/ops/groups.py writes it");

// The value of a level: exactly +-norm for the largest one, and never beyond.
GZ_HD float level_value(int32_t level, int32_t s, float norm) { return float(level) / float(s) * norm; }

}  // namespace gradzip
