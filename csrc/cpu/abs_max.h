// The largest magnitude of a piece of a tensor.
#pragma once

#include <cstdint>

#include "common/half.h"

namespace gradzip::cpu {

// The bits of max |x|, which order as magnitudes do, with every NaN above infinity. On the calling thread.
uint32_t abs_max_here(const float* x, int64_t n);
uint32_t abs_max_here(const BFloat16* x, int64_t n);
uint32_t abs_max_here(const Float16* x, int64_t n);

}  // namespace gradzip::cpu
