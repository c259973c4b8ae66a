// Rows of equal length, each with a key of the random generator.
#pragma once

#include "common/philox.h"

namespace gradzip::cuda {

// Keys of the rows that a launch takes, one for each blockIdx.y: an argument of the launch.
constexpr int kKeysBatch = 256;
struct Keys {
  uint64_t of[kKeysBatch];
};

}  // namespace gradzip::cuda
