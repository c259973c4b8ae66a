// Five trits to a byte. Digit k of byte j of a block is element k * width + j, so that vectors of neighbouring elements
// become vectors of bytes. The last block, of n elements, has width ceil(n / 5).
#pragma once

#include <cstdint>

#include "common/quantize.h"

namespace gradzip {

constexpr int kDigits = 5, kTritWidth = 64, kTritBlock = kDigits * kTritWidth;
constexpr uint32_t kTopByte = 242;  // 3^5 - 1

// A tensor to be packed, of the type `dtype` (common/half.h). A null clip is infinite.
struct TernarySource {
  const void* x;
  int64_t dtype, n;
  const float *scale, *clip;
  uint64_t key;
  uint8_t* packed;
};
static_assert(sizeof(TernarySource) == 56, "gradzip/ops/ternary.py writes it");

// float(weight * *scale) * (-1, 0 or 1). A null scale is 1.
struct TernaryTerm {
  const uint8_t* packed;
  const float* scale;
  double weight;
};
static_assert(sizeof(TernaryTerm) == 24, "gradzip/ops/ternary.py writes it");

// 0 is zero, 1 is plus, 2 is minus; plus or minus with probability min(|x|, clip) / scale.
GZ_HD uint32_t draw_trit(float x, LevelScale scale, float clip, uint32_t random) {
  const float magnitude = finite_magnitude(x);
  const int32_t level = stochastic_level(magnitude < clip ? magnitude : clip, scale, 1, random);
  return uint32_t(level) << (float_bits(x) >> 31);
}

// byte / 3, exact up to 255.
GZ_HD uint32_t third(uint32_t byte) { return byte * 171u >> 9; }

}  // namespace gradzip
