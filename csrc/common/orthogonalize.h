// What CPU and CUDA must agree on, so that a factor has the same bits wherever it is made orthonormal.
#pragma once

#include <cstdint>

namespace gradzip {

struct Matrix {
  float* data;
  int64_t rows, columns;
};
static_assert(sizeof(Matrix) == 24, "gradzip/ops/orthogonalize.py writes it");

constexpr int64_t kGramRows = 1024;  // whose products are added up one after the other; those sums are then added

// After one round, columns deviate from orthonormal by some 1e-16 growth^2, growth being the norm of R^-1 for columns
// scaled to length 1. Beyond this, another round.
constexpr double kGrowthLimit = 3e3;
// Cholesky's squared sine of the angle between a column and those before it; below, all is noise.
constexpr double kLeastPivot = 1e-13;
// The same angle in Gram-Schmidt: within the rounding of a float the column depends on those before it.
constexpr double kLeastSine = 0x1p-23;

enum class Verdict : int32_t { done, again, dependent };

}  // namespace gradzip
