// A vector in parts, one after the other, as equally long as can be: the first n % parts have one element more.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace gradzip {

struct Parts {
  int64_t shortest, longer;  // elements of a part, at least; how many parts have one more

  GZ_HD int64_t begin(int64_t part) const { return part * shortest + (part < longer ? part : longer); }
  GZ_HD int64_t length(int64_t part) const { return shortest + (part < longer); }
  // The parts from one on.
  GZ_HD Parts from(int64_t part) const { return {shortest, part < longer ? longer - part : 0}; }
};

inline Parts parts_of(int64_t n, int64_t parts) { return {n / parts, n % parts}; }

}  // namespace gradzip
