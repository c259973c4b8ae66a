// Block-scaled integers: a block of numbers is a float32 step and signed integers of 2, 4 or 8 bits, which count steps.
//
// Codes of 4 or 8 bits are from -top to top, and stand for multiples of the step. Codes of 2 bits are -2 to 1, and stand
// for a half step more: -3/2, -1/2, 1/2 and 3/2 steps. The step is a third of the largest magnitude, so that what is
// above 3/2 steps, half of it, is cut. Of steps that are a multiple of it, this one leaves the least error.
//
// A record is the step and then the codes, in two's complement and a little-endian bit stream: 4 + block * bits / 8
// bytes. A payload is the records of consecutive blocks; those past the last element have codes 0. The same functions
// run on the CPU and in CUDA kernels: plain float32 operations in a fixed order, so codes agree bit for bit.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "common/range_float.h"

namespace gradzip {

// Bits of a random draw: draw number i of a key is half i % 2 of word i / 2 of the generator.
constexpr int kDrawBits = 16;

// Blocks whose magnitudes are all smaller are encoded as if they reached this one, so that no quotient overflows.
constexpr float kLeastTop = 0x1p-100f;

// The largest code; the smallest is its negative. With 2 bits, the largest magnitude in steps: codes are cut.
GZ_HD int32_t block_float_top(int bits) { return bits == 2 ? 3 : (1 << (bits - 1)) - 1; }
GZ_HD int64_t block_float_nbytes(int bits, int64_t block) { return 4 + block * bits / 8; }

// step: the value of code 1, NaN if a number of the block is not finite.
// inverse: of the step; times 2^16 for stochastic rounding. No magnitude of the block times `inverse` exceeds the largest
// code (times 2^16), so codes need no clamping.
struct BlockScale {
  float step, inverse;
  bool finite;
};
// largest: the bits of the largest magnitude, which order as magnitudes do.
GZ_HD BlockScale block_scale(uint32_t largest, int bits, bool stochastic) {
  if (largest >= kInfBits) return {bits_float(0x7fc00000u), 0.0f, false};
  const float magnitude = bits_float(largest), top = magnitude > kLeastTop ? magnitude : kLeastTop;
  const float codes = float(block_float_top(bits)), limit = stochastic ? codes * float(1 << kDrawBits) : codes;
  // Rounded to nearest, a quotient may be half a unit too large. One unit less is always enough.
  float inverse = limit / top, step = top / codes;
  if (top * inverse > limit) inverse = bits_float(float_bits(inverse) - 1u);
  if (float_bits(step * codes) > kMaxFiniteBits) step = bits_float(float_bits(step) - 1u);
  return {step, inverse, true};
}

// x / step rounded to nearest, ties to even: the sum has no bits below the point, and the integer in its lowest ones.
GZ_HD int32_t nearest_code(float x, float inverse) {
  return int32_t(float_bits(x * inverse + 0x1.8p23f)) - int32_t(0x4b400000);
}

// floor(x / step + u), where u = draw / 2^16 is uniform in [0, 1). x / step is cut to 16 bits below the point, so its
// expectation is off by less than 2^-16.
GZ_HD int32_t stochastic_code(float x, float inverse, uint32_t draw) {
  return (int32_t(x * inverse) + int32_t(draw)) >> kDrawBits;
}

// The nearest of the values of 2-bit codes. Zero, which none of them is, goes up in elements of even index.
GZ_HD int32_t half_step_code(float x, float inverse, bool odd) {
  const float steps = x * inverse;
  return -2 + int32_t(steps >= -1.0f) + int32_t(odd ? steps > 0.0f : steps >= 0.0f) + int32_t(steps >= 1.0f);
}

// The value of code 0, in steps.
GZ_HD float block_float_offset(int bits) { return bits == 2 ? 0.5f : 0.0f; }
GZ_HD float block_float_value(int32_t code, float offset, float step) { return (float(code) + offset) * step; }

}  // namespace gradzip
