// The order in which CPU and CUDA sum doubles, so that both get the same bits: element i of a segment belongs to lane
// i % 16; lanes are summed in pairs (j and j + 8, then + 4, + 2, + 1), and segments in order, from 0.
#pragma once

#include <cstdint>

namespace gradzip {

constexpr int kSumLanes = 16;
constexpr int64_t kSumSegment = 1 << 13;

}  // namespace gradzip
