// Norms of buckets of consecutive elements, as QSGD and its kin scale by them.
#pragma once

#include <cstdint>

#include "common/quantize.h"
#include "common/sums.h"

namespace gradzip::cpu {

// One segment's part of its bucket's norm: the sum of squares or of magnitudes, or the largest magnitude. NaN counts as
// 0 and infinity as the largest float. The order of the additions is fixed, and they are done in double: nothing
// overflows, nothing is lost to underflow, and every instruction set gets the same bits. n <= kSumSegment.
double norm_part(const float* x, int64_t n, Norm norm);

// Parts are combined in order, from 0, and then finished.
double norm_combine(double total, double part, Norm norm);
float norm_finish(double total, Norm norm);

// The norms of buckets (`bucket_norms` in cpu/ops.h) that fit one task: on the caller's thread alone.
void bucket_norms_here(const float* x, int64_t n, int64_t bucket, Norm norm, float* norms);

}  // namespace gradzip::cpu
