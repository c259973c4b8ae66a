// The range-based N-bit float (FFT-based Gradient Sparsification, HPDC'20, section 3.2.1 and Algorithm 1).
//
// Everything is integer arithmetic on t(x) = bits(|x|) >> (23 - m), which is monotone in |x| and steps by one from a
// float with an m-bit mantissa to the next. Code 0 is zero; 1..P are the positive floats t = pbase, pbase+1, ...;
// P+1..P+Q the negative ones. The same functions run on the CPU and in CUDA kernels, so codes agree bit for bit.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/macros.h"

namespace gradzip {

struct RangeFloat {
  uint32_t pbase;     // t of eps, the smallest positive number that has a code; >= 1
  uint32_t positive;  // P
  uint32_t negative;  // Q; P + Q <= 2^bits - 1
  int32_t mantissa;   // m
  int32_t bits;       // N
  float vmin, vmax;   // values beyond are clamped (and counted)
};
static_assert(sizeof(RangeFloat) == 28, "gradzip/ops/range_float.py reads these seven words");

constexpr uint32_t kMaxFiniteBits = 0x7f7fffffu;  // FLT_MAX
constexpr uint32_t kInfBits = 0x7f800000u;

GZ_HD uint32_t float_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}
GZ_HD float bits_float(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

GZ_HD int range_shift(const RangeFloat& r) { return 23 - r.mantissa; }

// t(|x|) rounded to nearest (ties away from zero), never up to infinity.
GZ_HD uint32_t range_t(float magnitude, int shift) {
  const uint32_t half = shift > 0 ? 1u << (shift - 1) : 0u;
  const uint32_t t = (float_bits(magnitude) + half) >> shift;
  const uint32_t most = kMaxFiniteBits >> shift;
  return t < most ? t : most;
}

// pbase in closed form: P + Q = 2^N - 1 and P - t(max) = Q - t(|min|) = 1 - pbase give
// pbase = ceil((t(max) + t(|min|) + 2 - (2^N - 1)) / 2). A side whose limit is below eps gets no code; the other side
// gets all of them.
GZ_HD RangeFloat make_range_float(int bits, int mantissa, float vmin, float vmax) {
  RangeFloat r;
  r.bits = bits;
  r.mantissa = mantissa;
  r.vmin = vmin;
  r.vmax = vmax;
  const int shift = range_shift(r);
  const int64_t codes = (int64_t(1) << bits) - 1;
  const int64_t up = range_t(vmax + 0.0f, shift), down = range_t(0.0f - vmin, shift);  // -0 has a sign bit, 0 none
  int64_t pbase = (up + down + 3 - codes) >> 1;  // floor((s + 1) / 2) = ceil(s / 2), for negative s too
  // The side without codes stays so: the other takes all codes, down to its own limit.
  const int64_t least = up < down ? up : down, most = up < down ? down : up;
  if (least < pbase) pbase = most + 1 - codes > least + 1 ? most + 1 - codes : least + 1;
  if (pbase < 1) pbase = 1;
  r.pbase = uint32_t(pbase);
  r.positive = uint32_t(up < pbase ? 0 : up - pbase + 1);
  r.negative = uint32_t(down < pbase ? 0 : down - pbase + 1);
  return r;
}

GZ_HD float range_eps(const RangeFloat& r) { return bits_float(r.pbase << range_shift(r)); }

// Code of x. `noise` is 1 << (shift - 1) to round to nearest, or uniform in [0, 1 << shift) to round stochastically:
// floats are linear within an octave, so the carry happens with the probability that makes the result unbiased.
// `underflow` is the magnitude from which a number below eps becomes eps: eps/2, or u * eps for u uniform in (0, 1].
// Zero stays zero, NaN becomes 0.
GZ_HD uint32_t range_encode(const RangeFloat& r, float x, uint32_t noise, float underflow) {
  // Signed and strict, all below 2^31: AVX2 has no other comparison.
  const uint32_t u = float_bits(x);
  const int32_t magnitude = int32_t(u & 0x7fffffffu), below = int32_t(r.pbase << range_shift(r)) - 1;
  const int32_t t = int32_t((uint32_t(magnitude) + noise) >> range_shift(r));
  const bool negative = int32_t(u) < 0;
  const int32_t limit = int32_t(negative ? r.negative : r.positive), before = negative ? int32_t(r.positive) : 0;
  // magnitude >= underflow > 0 as one comparison, since two would not vectorise. Zero is reached by none.
  int32_t index = magnitude > int32_t((float_bits(underflow) - 1u) & 0x7fffffffu) ? 1 : 0;
  index = magnitude > below ? t - int32_t(r.pbase) + 1 : index;  // noise applies above eps only, underflow below
  index = index < limit ? index : limit;
  index = magnitude < int32_t(kInfBits + 1u) ? index : 0;
  return index > 0 ? uint32_t(index + before) : 0u;
}

// range_encode never writes codes above P + Q; they decode to zero.
GZ_HD float range_decode(const RangeFloat& r, uint32_t code) {
  const bool negative = code > r.positive;
  const uint32_t index = negative ? code - r.positive : code;
  if (index == 0 || (negative && index > r.negative)) return 0.0f;
  return bits_float(((index - 1u + r.pbase) << range_shift(r)) | (negative ? 0x80000000u : 0u));
}

// The rounding parameters of range_encode.
struct Rounding {
  uint32_t noise;   // 1 << (shift - 1), or the mask of the random bits
  float underflow;  // eps / 2, or eps
};

GZ_HD Rounding range_rounding(const RangeFloat& format, bool stochastic) {
  const int shift = range_shift(format);
  const float eps = range_eps(format);
  if (stochastic) return {(1u << shift) - 1, eps};
  return {shift > 0 ? 1u << (shift - 1) : 0u, 0.5f * eps};
}

// NaN is outside every range.
GZ_HD bool range_outside(const RangeFloat& format, float x) { return !(x >= format.vmin && x <= format.vmax); }

// The 8 bytes from which a peer decodes, little-endian: pbase (4), P (2), m (1), N (1).
GZ_HD uint64_t range_wire(const RangeFloat& r) {
  return uint64_t(r.pbase) | uint64_t(r.positive & 0xffffu) << 32 | uint64_t(uint8_t(r.mantissa)) << 48 |
         uint64_t(uint8_t(r.bits)) << 56;
}

// The inverse. Returns whether it is a format of `bits` bits of which every code decodes to a finite number; if not, it
// is not written.
GZ_HD bool range_of_wire(uint64_t wire, int bits, RangeFloat* r) {
  const int64_t pbase = int64_t(wire & 0xffffffffu), positive = int64_t(wire >> 32 & 0xffffu);
  const int mantissa = int(wire >> 48 & 0xffu);
  if (int(wire >> 56) != bits || bits < 2 || bits > 16 || mantissa < 1 || mantissa > bits || pbase < 1) return false;
  const int64_t codes = (int64_t(1) << bits) - 1;
  const int64_t room = int64_t(kMaxFiniteBits >> (23 - mantissa)) - pbase + 1;  // numbers from eps to the largest float
  if (positive > codes || positive > room) return false;
  r->pbase = uint32_t(pbase);
  r->positive = uint32_t(positive);
  const int64_t negative = codes - positive < room ? codes - positive : room;
  r->negative = uint32_t(negative > 0 ? negative : 0);
  r->mantissa = mantissa;
  r->bits = bits;
  r->vmin = r->vmax = bits_float(0x7fc00000u);
  return true;
}

}  // namespace gradzip
