// The table of topk_abs, with an entry for each vector.
#pragma once

#include <cstdint>

namespace gradzip {

// A vector of n elements, and where the k largest go.
struct TopkSource {
  const float* x;
  int64_t n, k;
  int32_t* indices;
  float* values;
};
static_assert(sizeof(TopkSource) == 40, "gradzip/ops/topk_abs.py writes it");

}  // namespace gradzip
