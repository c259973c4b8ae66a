// Norms of buckets of consecutive elements, by which QSGD and similar methods scale.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/quantize.h"
#include "common/sums.h"
#include "cpu/half.h"

namespace gradzip::cpu {

// The contribution of one segment to the norm of its bucket: the sum of squares or of magnitudes, or the largest
// magnitude. NaN counts as 0 and infinity as the largest float. Summed in double in a fixed order: no overflow, no
// underflow, the same bits with every instruction set. n <= kSumSegment.
double norm_part(const float* x, int64_t n, Norm norm);

// Combine the parts of a bucket in order, starting from 0, then finish.
double norm_combine(double total, double part, Norm norm);
float norm_finish(double total, Norm norm);

// `bucket_norms` (kernels.h) on the calling thread.
template <class T>
void bucket_norms_here(const T* x, int64_t n, int64_t bucket, Norm norm, float* norms) {
  float buffer[kSumSegment];
  for (int64_t begin = 0; begin < n; begin += bucket) {
    const int64_t end = std::min(n, begin + bucket);
    double total = 0.0;
    for (int64_t i = begin; i < end; i += kSumSegment) {
      const int64_t count = std::min(kSumSegment, end - i);
      total = norm_combine(total, norm_part(as_floats(x + i, count, buffer), count, norm), norm);
    }
    *norms++ = norm_finish(total, norm);
  }
}

}  // namespace gradzip::cpu
