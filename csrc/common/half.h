// 16-bit floats, as gradients have in mixed precision: read as floats, and written rounded to nearest, ties to even.
// Integer arithmetic and no subnormal floats, so that all devices give the same bits, whatever their flags.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "common/range_float.h"

namespace gradzip {

// Terms of a sum that kernels add to 16-bit floats in one launch: it is rounded once (MOST_HALF_TERMS of ops/_native.py).
constexpr int kMostHalfTerms = 240;

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// Types of the elements of an array, numbered as in gradzip/ops/_native.py.
enum class Dtype : int { float32, bfloat16, float16 };

GZ_HD float to_float(float x) { return x; }
GZ_HD float to_float(BFloat16 x) { return bits_float(uint32_t(x.bits) << 16); }
GZ_HD float to_float(Float16 x) {
  constexpr uint32_t kRebias = (127u - 15u) << 23;
  const uint32_t magnitude = x.bits & 0x7fffu;
  uint32_t bits = (magnitude << 13) + kRebias;
  if (magnitude >= 0x7c00u) bits += kRebias;  // infinity and NaN
  // A subnormal number counts units of 2^-24, as the lowest bits of 1/2 do.
  if (magnitude < 0x0400u) bits = float_bits(bits_float(0x3f000000u | magnitude) - 0.5f);
  return bits_float(bits | uint32_t(x.bits & 0x8000u) << 16);
}

// The number x as a T.
template <class T>
GZ_HD T rounded(float x);
template <>
GZ_HD float rounded<float>(float x) {
  return x;
}
template <>
GZ_HD BFloat16 rounded<BFloat16>(float x) {
  const uint32_t bits = float_bits(x);
  if ((bits & 0x7fffffffu) > kInfBits) return {0x7fc0};
  return {uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}
template <>
GZ_HD Float16 rounded<Float16>(float x) {
  const uint32_t bits = float_bits(x), magnitude = bits & 0x7fffffffu;
  uint32_t half = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - ((127u - 15u) << 23)) >> 13;
  if (magnitude < 0x38800000u) half = float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u;  // below 2^-14: as above
  if (magnitude >= 0x47800000u) half = magnitude > kInfBits ? 0x7e00u : 0x7c00u;  // 2^16 and above
  return {uint16_t(half | (bits >> 16 & 0x8000u))};
}

}  // namespace gradzip
