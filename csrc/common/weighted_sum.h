// The table of decoders that add encoded tensors up, several sums in one call. Each has terms of its own.
#pragma once

#include <cstdint>

namespace gradzip {

// out = the sum of the next `terms` terms, in order, or out += each if `add`. dtype: of `out` (common/half.h), float32 if
// `add`. A sum is computed in float32, and rounded once.
struct WeightedSum {
  void* out;
  int64_t n, terms, add, dtype;
};
static_assert(sizeof(WeightedSum) == 40, "gradzip/ops/weighted_sum.py writes it");

}  // namespace gradzip
