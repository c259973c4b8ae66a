// Arguments of the passes of low-rank compression: a table has an entry for each matrix.
#pragma once

#include <cstdint>

namespace gradzip {

// e += m, then out = e factor, or e^T factor if `transpose`. Without e, m itself is multiplied, of the type `dtype`
// (common/half.h).
struct Projection {
  const void* m;
  int64_t dtype;
  float* e;
  int64_t rows, columns;
  const float* factor;
  int64_t rank, transpose;
  float* out;
};
static_assert(sizeof(Projection) == 72, "gradzip/ops/low_rank.py writes it");

// e = m - sent_p sent_q^T, then out = p q^T, of the type `dtype`, which may be m. e stays as it is, and m is not read, if e
// is null, or if `number` is neither null nor finite.
struct AverageUpdate {
  void* out;
  int64_t dtype;
  const float* m;
  float* e;
  const float *sent_p, *sent_q, *p, *q;
  int64_t rows, columns, rank;
  const float* number;
};
static_assert(sizeof(AverageUpdate) == 96, "gradzip/ops/low_rank.py writes it");

}  // namespace gradzip
