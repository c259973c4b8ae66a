// The table of add_residual, with an entry for each part of a gradient vector.
#pragma once

#include <cstdint>

namespace gradzip {

// out = x + residual, of n elements each. dtype: of x (common/half.h). out may be x if that is float32.
struct ResidualSum {
  const void* x;
  const float* residual;
  float* out;
  int64_t n, dtype;
};
static_assert(sizeof(ResidualSum) == 40, "gradzip/ops/groups.py writes it");

}  // namespace gradzip
