#include "cpu/bucket_norms.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/abs_max.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace gradzip::cpu {
namespace {

// lanes[i % kSumLanes] += x[i]^2, for whole rows of lanes. The square of a float is exact in double, so a fused
// multiply-add has the same result as a multiplication and an addition.

void add_squares_scalar(const float* x, int64_t rows, double* lanes) {
  for (; rows > 0; --rows, x += kSumLanes)
    for (int j = 0; j < kSumLanes; ++j) lanes[j] += double(x[j]) * double(x[j]);
}

GZ_AVX2 void add_squares_avx2(const float* x, int64_t rows, double* lanes) {
  __m256d sum[4];
  for (int j = 0; j < 4; ++j) sum[j] = _mm256_loadu_pd(lanes + 4 * j);
  for (; rows > 0; --rows, x += kSumLanes) {
    for (int j = 0; j < 4; ++j) {
      const __m256d v = _mm256_cvtps_pd(_mm_loadu_ps(x + 4 * j));
      sum[j] = _mm256_add_pd(sum[j], _mm256_mul_pd(v, v));
    }
  }
  for (int j = 0; j < 4; ++j) _mm256_storeu_pd(lanes + 4 * j, sum[j]);
}

GZ_AVX512 void add_squares_avx512(const float* x, int64_t rows, double* lanes) {
  __m512d low = _mm512_loadu_pd(lanes), high = _mm512_loadu_pd(lanes + 8);
  for (; rows > 0; --rows, x += kSumLanes) {
    const __m512d a = _mm512_cvtps_pd(_mm256_loadu_ps(x)), b = _mm512_cvtps_pd(_mm256_loadu_ps(x + 8));
    low = _mm512_fmadd_pd(a, a, low);
    high = _mm512_fmadd_pd(b, b, high);
  }
  _mm512_storeu_pd(lanes, low);
  _mm512_storeu_pd(lanes + 8, high);
}

GZ_SIMD_SELECT(void, add_squares, (const float* x, int64_t rows, double* lanes), (x, rows, lanes))

GZ_INLINE void add_magnitudes_body(const float* x, int64_t rows, double* lanes) {
  for (; rows > 0; --rows, x += kSumLanes)
    for (int j = 0; j < kSumLanes; ++j) lanes[j] += double(std::fabs(x[j]));
}
GZ_SIMD_DISPATCH(void, add_magnitudes, (const float* x, int64_t rows, double* lanes), (x, rows, lanes))

double sum(const float* x, int64_t n, Norm norm) {
  double lanes[kSumLanes] = {};
  const int64_t rows = n / kSumLanes;
  norm == Norm::l1 ? add_magnitudes(x, rows, lanes) : add_squares(x, rows, lanes);
  for (int64_t i = rows * kSumLanes; i < n; ++i)
    lanes[i % kSumLanes] += norm == Norm::l1 ? double(std::fabs(x[i])) : double(x[i]) * double(x[i]);
  for (int width = kSumLanes / 2; width > 0; width /= 2)
    for (int j = 0; j < width; ++j) lanes[j] += lanes[j + width];
  return lanes[0];
}

}  // namespace

double norm_part(const float* x, int64_t n, Norm norm) {
  if (norm == Norm::max) {
    const uint32_t most = abs_max_here(x, n);
    if (most < kInfBits) return bits_float(most);
  } else {
    const double total = sum(x, n, norm);
    if (std::isfinite(total)) return total;
  }
  // The sum of squares of finite floats does not overflow: x holds an infinity or a NaN.
  float finite[kSumSegment];
  std::transform(x, x + n, finite, [](float value) { return finite_magnitude(value); });
  return norm == Norm::max ? bits_float(abs_max_here(finite, n)) : sum(finite, n, norm);
}

double norm_combine(double total, double part, Norm norm) {
  return norm == Norm::max ? std::max(total, part) : total + part;
}

float norm_finish(double total, Norm norm) { return norm_value(norm == Norm::l2 ? std::sqrt(total) : total); }

namespace {

template <class T>
void all_norms(const T* x, int64_t n, int64_t bucket, Norm norm, float* norms, int threads) {
  if (bucket <= kChunk) {
    const int64_t together = std::max<int64_t>(1, kChunk / bucket) * bucket;
    parallel_chunks(n, together, threads, [&](int64_t, int64_t begin, int64_t end) {
      bucket_norms_here(x + begin, end - begin, bucket, norm, norms + begin / bucket);
    });
    return;
  }
  const int64_t segments = ceil_div(std::min(n, bucket), kSumSegment);  // of each bucket
  std::vector<double> parts(segments * ceil_div(n, bucket), 0.0);
  parallel_for(int64_t(parts.size()), threads, [&](int64_t task) {
    const int64_t first = task / segments * bucket, begin = first + task % segments * kSumSegment;
    const int64_t end = std::min({n, first + bucket, begin + kSumSegment});
    float buffer[kSumSegment];
    if (begin < end) parts[task] = norm_part(as_floats(x + begin, end - begin, buffer), end - begin, norm);
  });
  for (size_t b = 0; b * segments < parts.size(); ++b) {
    double total = 0.0;
    for (int64_t s = 0; s < segments; ++s) total = norm_combine(total, parts[b * segments + s], norm);
    norms[b] = norm_finish(total, norm);
  }
}

}  // namespace

void bucket_norms(const void* x, int dtype, int64_t n, int64_t bucket, int norm, float* norms, int threads) {
  typed(x, dtype, [&](auto* of) { all_norms(of, n, bucket, Norm(norm), norms, threads); });
}

}  // namespace gradzip::cpu
