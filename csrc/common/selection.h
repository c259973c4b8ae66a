// What a top-k selection keeps.
#pragma once

#include <cstdint>

namespace gradzip {

// All of |x| above `threshold`, and the first `ties` of those equal to it. NaN counts as larger than infinity.
struct Selection {
  float threshold;
  int32_t unused;
  int64_t ties;
};
static_assert(sizeof(Selection) == 16, "gradzip/ops/select.py reads it");

}  // namespace gradzip
