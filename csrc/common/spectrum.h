// The scale in which energies of a spectrum are computed.
#pragma once

#include "common/range_float.h"

namespace gradzip {

// A power of two that brings amax into [1, 2): squares neither overflow nor, down to 1e-19 of amax, vanish.
GZ_HD float unit_scale(float amax) {
  const int exponent = int(float_bits(amax) >> 23);
  const int inverse = 254 - exponent;
  return bits_float(uint32_t(inverse < 1 ? 1 : inverse) << 23);
}

}  // namespace gradzip
