// The two means of 1-bit SGD, from sums in double (common/sums.h) in the same order on CPU and CUDA.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "common/sums.h"

namespace gradzip {

// A tensor of rows to be packed, and the two means of each row.
struct OneBitSource {
  const float* x;
  int64_t rows, columns;
  uint64_t key;
  uint8_t* packed;
  float* means;
};
static_assert(sizeof(OneBitSource) == 48, "gradzip/ops/one_bit.py writes it");

// weight * the mean for its row and bit. Rows are of `columns` elements, a divisor of n.
struct OneBitTerm {
  const uint8_t* packed;
  const float* means;
  int64_t columns;
  double weight;
};
static_assert(sizeof(OneBitTerm) == 32, "gradzip/ops/one_bit.py writes it");

// Sums of the values above and below zero, without NaN, and the number of bits set.
struct Sides {
  double positive, negative;
  int64_t set;
};

GZ_HD float side_mean(double sum, int64_t count) {
  constexpr double kLargest = 0x1.fffffep127;
  if (count == 0) return 0.0f;
  const double mean = sum / double(count);
  return float(mean > kLargest ? kLargest : mean < -kLargest ? -kLargest : mean);
}

// Means of the values whose bit is clear and of those whose bit is set.
GZ_HD void side_means(const Sides& sides, int64_t columns, float* means) {
  means[0] = side_mean(sides.positive, columns - sides.set);
  means[1] = side_mean(sides.negative, sides.set);
}

}  // namespace gradzip
