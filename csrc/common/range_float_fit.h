// Chooses the mantissa with the least expected squared error on a histogram of the tensor's magnitudes. Sums run in one
// order everywhere, so that CPU and CUDA make the same choice.
#pragma once

#include "common/range_float.h"

namespace gradzip {

// Values to fit a format to.
struct RangeFit {
  RangeFloat* format;
  const float* x;
  int64_t n;
};
static_assert(sizeof(RangeFit) == 24, "gradzip/ops/range_float.py writes it");

// Values to encode as a bit stream of `bits` bits each.
struct RangeSource {
  const RangeFloat* format;
  const float* x;
  int64_t n;
  uint64_t key;
  uint8_t* packed;
  int64_t* outside;
};
static_assert(sizeof(RangeSource) == 48, "gradzip/ops/range_float.py writes it");

// A bit stream of n codes, the 8 bytes of their format (range_wire), and where their values go.
struct RangeCodes {
  const uint8_t* wire;
  const uint8_t* packed;
  int64_t n;
  float* x;
};
static_assert(sizeof(RangeCodes) == 32, "gradzip/ops/groups.py writes it");

// Magnitudes by exponent and the top three mantissa bits: eight bins to the octave.
constexpr int kBinShift = 20;
constexpr int kBins = 1 << (31 - kBinShift);
constexpr int kFiniteBins = int(kInfBits >> kBinShift);

// The choice of m is insensitive to sampling error, so the histogram of a large tensor is that of a sample: runs of
// neighbours, since scattered values would cost a cache line each. A run begins every histogram_step(n) elements.
constexpr int64_t kHistogramSample = 1 << 18, kHistogramRun = 1 << 10;
GZ_HD int64_t histogram_step(int64_t n) {
  return kHistogramRun * (n / kHistogramSample > 1 ? n / kHistogramSample : 1);
}

// The sum over bins is computed as 32 sums of every 32nd bin, which are then added in pairs: 0 and 16, 1 and 17, ...,
// 0 and 8, ..., 0 and 1.
constexpr int kErrorLanes = 32;

GZ_HD double power_of_two(int exponent) {
  const uint64_t bits = uint64_t(exponent + 1023) << 52;
  double x;
  memcpy(&x, &bits, 8);
  return x;
}
GZ_HD int exponent_of(double x) {  // of a positive normal number
  uint64_t bits;
  memcpy(&bits, &x, 8);
  return int(bits >> 52) - 1023;
}

// Largest magnitude that has a code; 0 if there is none.
GZ_HD double range_most(const RangeFloat& format) {
  const uint32_t codes = format.positive > format.negative ? format.positive : format.negative;
  return bits_float((codes + format.pbase - 1u) << range_shift(format));
}

// Expected squared error of rounding a value of a bin to nearest: the value is taken to be at the middle of the bin,
// uniformly distributed within a step of the format.
GZ_HD double bin_error(const RangeFloat& format, double eps, double most, int bin) {
  const uint32_t next = uint32_t(bin + 1) << kBinShift;
  const double low = bits_float(uint32_t(bin) << kBinShift), high = next < kInfBits ? bits_float(next) : low;
  // The largest value may be in the lower half of its bin; no value is beyond it.
  const double middle = 0.5 * (low + high), end = format.vmax > -format.vmin ? format.vmax : -format.vmin;
  const double x = middle < end ? middle : end;
  if (x < eps) {
    const double nearest = eps - x < x ? eps - x : x;
    return nearest * nearest;
  }
  const double reached = most < x ? most : x;
  const double step = reached > 0.0 ? power_of_two(exponent_of(reached) - format.mantissa) : 0.0;
  return step * step / 12.0 + (x > most ? (x - most) * (x - most) : 0.0);
}

}  // namespace gradzip
