// Independent draws, each with its own probability.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace gradzip {

// Both sides are exact in double. Comparisons with NaN are false.
GZ_HD bool is_drawn(float p, uint32_t draw) { return double(draw) < double(p) * 0x1p32; }

}  // namespace gradzip
