// The table of topk_abs, with an entry for each vector.
#pragma once

#include <cstdint>

#include "common/selection.h"

namespace gradzip {

// A vector of n elements, and where k of them go: those of the selection, or the largest if it is null.
struct TopkSource {
  const float* x;
  int64_t n, k;
  const Selection* selection;
  int32_t* indices;
  float* values;
};
static_assert(sizeof(TopkSource) == 48, "gradzip/ops/groups.py writes it");

}  // namespace gradzip
