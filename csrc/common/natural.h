// Natural compression (Horváth, Ho, Horváth, Sahu, Canini, Richtárik, Natural Compression for Distributed Deep Learning,
// 2019): the sign and the exponent of a float32, 9 bits, which stand for a power of two. Integer operations throughout.
//
// A payload is a little-endian bit stream of codes: eight are nine bytes, and code j of them begins at bit j of byte j.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "common/range_float.h"

namespace gradzip {

constexpr int kNaturalBits = 9;
constexpr uint32_t kNaturalMask = (1u << kNaturalBits) - 1u;
constexpr uint32_t kNaturalInf = 0xffu;  // the exponent of infinities and NaNs

// A vector to encode, and where its codes go.
struct NaturalSource {
  const void* x;
  int64_t n;
  uint64_t key;
  uint8_t* packed;
};
static_assert(sizeof(NaturalSource) == 32, "gradzip/ops/groups.py writes it");

// The code of x, or of the next power of two with the probability of x's mantissa, draw / 2^32 < mantissa / 2^23. There is
// no power above the largest exponent of finite numbers.
GZ_HD uint32_t natural_code(float x, uint32_t draw) {
  const uint32_t bits = float_bits(x);
  const uint32_t code = (bits >> 23) + uint32_t(draw < (bits << kNaturalBits));
  return (code - uint32_t((code & kNaturalInf) == kNaturalInf)) & kNaturalMask;
}

// The number that code j of eight stands for, of the two bytes from byte j on. Infinite if the exponent is kNaturalInf.
GZ_HD float natural_value(uint32_t two_bytes, int j) { return bits_float(two_bytes << (23 - j) & 0xff800000u); }
GZ_HD bool valid_natural(float value) { return (float_bits(value) & kInfBits) != kInfBits; }

}  // namespace gradzip
