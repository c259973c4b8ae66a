// The table of decoders that add encoded tensors up, several sums in one call. Each has terms of its own.
#pragma once

#include <cstdint>

namespace gradzip {

// out = the sum of the next `terms` terms, in order, or out += each if `add`.
struct WeightedSum {
  float* out;
  int64_t n, terms, add;
};
static_assert(sizeof(WeightedSum) == 32, "gradzip/ops/weighted_sum.py writes it");

}  // namespace gradzip
