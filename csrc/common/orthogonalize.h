// Constants that CPU and CUDA share, so that orthonormal factors have the same bits on both.
#pragma once

#include <cstdint>

namespace gradzip {

struct Matrix {
  float* data;
  int64_t rows, columns;
};
static_assert(sizeof(Matrix) == 24, "gradzip/ops/orthogonalize.py writes it");

// Rows per block: products are summed in order within a block, then the sums of blocks.
constexpr int64_t kGramRows = 1024;

// After one round, columns deviate from orthonormal by about 1e-16 growth^2, where growth is the norm of R^-1 for
// columns scaled to length 1. Above this limit, a second round runs.
constexpr double kGrowthLimit = 3e3;
// Least squared sine of the angle between a column and those before it that Cholesky can tell from noise.
constexpr double kLeastPivot = 1e-13;
// The same for Gram-Schmidt: below it, a column depends on those before it, within the rounding of a float.
constexpr double kLeastSine = 0x1p-23;

enum class Verdict : int32_t { done, again, dependent };

}  // namespace gradzip
