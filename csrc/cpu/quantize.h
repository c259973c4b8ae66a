// Quantized levels (QSGD), for the kernels that pack them and those that Elias-code them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/quantize.h"
#include "cpu/half.h"
#include "cpu/simd.h"

namespace gradzip::cpu {

// Elements of a piece, about: its norms are computed, then its levels, which prefetch the piece that is this far ahead.
constexpr int64_t kAhead = 1 << 12;

template <class T>
struct Quantizer {
  const T* x;
  int64_t n;
  const float* norms;
  int64_t bucket;
  int bits;
  uint64_t key;
};

// f(begin, end, b) for each part of [begin, end) within one bucket b.
template <class F>
GZ_INLINE void by_bucket(int64_t begin, int64_t end, int64_t bucket, F&& f) {
  for (int64_t b = begin / bucket; begin < end; ++b) {
    const int64_t stop = std::min(end, (b + 1) * bucket);
    f(begin, stop, b);
    begin = stop;
  }
}

// Levels of x[begin, end); begin is a multiple of 4, and the norms are known.
void quantize_levels(const Quantizer<float>& q, int64_t begin, int64_t end, int32_t* levels);

inline bool all_norms(const float* norms, int64_t count) {
  for (int64_t b = 0; b < count; ++b)
    if (!valid_norm(norms[b])) return false;
  return true;
}

}  // namespace gradzip::cpu
