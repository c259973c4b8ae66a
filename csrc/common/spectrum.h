// The scale of the energies of a spectrum.
#pragma once

#include "common/range_float.h"

namespace gradzip {

// The power of two that scales amax into [1, 2): squares do not overflow, and those of values above 1e-19 amax do not
// underflow.
GZ_HD float unit_scale(float amax) {
  const int exponent = int(float_bits(amax) >> 23);
  const int inverse = 254 - exponent;
  return bits_float(uint32_t(inverse < 1 ? 1 : inverse) << 23);
}

}  // namespace gradzip
