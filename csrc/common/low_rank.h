// Arguments of the passes of low-rank compression: a table has an entry for each matrix.
#pragma once

#include <cstdint>

namespace gradzip {

// e += m, then out = e factor, or e^T factor if `transpose`. Without e, m itself is multiplied.
struct Projection {
  const float* m;
  float* e;
  int64_t rows, columns;
  const float* factor;
  int64_t rank, transpose;
  float* out;
};
static_assert(sizeof(Projection) == 64, "gradzip/ops/low_rank.py writes it");

// e = m - sent_p sent_q^T, then m = p q^T. e stays as it is if it is null, or if `number` is neither null nor finite.
struct AverageUpdate {
  float *m, *e;
  const float *sent_p, *sent_q, *p, *q;
  int64_t rows, columns, rank;
  const float* number;
};
static_assert(sizeof(AverageUpdate) == 80, "gradzip/ops/low_rank.py writes it");

}  // namespace gradzip
