// The CPU kernels: those of kernels.h, with the maximum number of threads as another parameter. Results have the same
// bits for any number of threads and at every SIMD level.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace gradzip::cpu {

#define KERNEL(name, ...) void name(__VA_ARGS__, int threads)
#define KERNEL_WITH_WORKSPACE KERNEL
#include "kernels.h"

}  // namespace gradzip::cpu
