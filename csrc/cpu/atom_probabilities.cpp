// ATOMO's probabilities, in the rounds of common/atom_probabilities.h.
#include "common/atom_probabilities.h"

#include <cmath>
#include <vector>

#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace gradzip::cpu {
namespace {

// Sums of one segment.
template <class T>
GZ_INLINE Split split_loop(const T* atoms, int64_t n, Limits at) {
  double rest[kSumLanes] = {};
  int64_t above[kSumLanes] = {};
  int64_t i = 0;
  for (; i + kSumLanes <= n; i += kSumLanes) {
    for (int j = 0; j < kSumLanes; ++j) {
      const double m = std::fabs(double(atoms[i + j])) * at.unit;
      rest[j] += m > at.upto ? 0.0 : m;
      above[j] += m > at.over;
    }
  }
  for (int j = 0; i < n; ++i, ++j) {
    const double m = std::fabs(double(atoms[i])) * at.unit;
    rest[j] += m > at.upto ? 0.0 : m;
    above[j] += m > at.over;
  }
  for (int width = kSumLanes / 2; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) {
      rest[j] += rest[j + width];
      above[j] += above[j + width];
    }
  }
  return {rest[0], above[0]};
}

template <class T>
GZ_INLINE void split_segments(const T* atoms, int64_t n, Limits at, Split* parts) {
  for (int64_t i = 0; i < n; i += kSplitSegment)
    *parts++ = split_loop(atoms + i, n - i < kSplitSegment ? n - i : kSplitSegment, at);
}
GZ_INLINE void split_floats_body(const float* atoms, int64_t n, Limits at, Split* parts) {
  split_segments(atoms, n, at, parts);
}
GZ_INLINE void split_doubles_body(const double* atoms, int64_t n, Limits at, Split* parts) {
  split_segments(atoms, n, at, parts);
}
GZ_SIMD_DISPATCH(void, split_floats, (const float* atoms, int64_t n, Limits at, Split* parts), (atoms, n, at, parts))
GZ_SIMD_DISPATCH(void, split_doubles, (const double* atoms, int64_t n, Limits at, Split* parts), (atoms, n, at, parts))

template <class T>
GZ_INLINE void apply_loop(const T* atoms, int64_t n, const Water& water, T* p) {
  for (int64_t i = 0; i < n; ++i) p[i] = T(atom_probability(water, std::fabs(double(atoms[i]))));
}
GZ_INLINE void apply_floats_body(const float* atoms, int64_t n, Water water, float* p) {
  apply_loop(atoms, n, water, p);
}
GZ_INLINE void apply_doubles_body(const double* atoms, int64_t n, Water water, double* p) {
  apply_loop(atoms, n, water, p);
}
GZ_SIMD_DISPATCH(void, apply_floats, (const float* atoms, int64_t n, Water water, float* p), (atoms, n, water, p))
GZ_SIMD_DISPATCH(void, apply_doubles, (const double* atoms, int64_t n, Water water, double* p), (atoms, n, water, p))

Split combine(const std::vector<Split>& parts) {
  Split lanes[kSplitLanes] = {};
  for (size_t j = 0; j < parts.size(); ++j) {
    lanes[j % kSplitLanes].rest += parts[j].rest;
    lanes[j % kSplitLanes].above += parts[j].above;
  }
  const auto in_pairs = [&](int first, int count, int step) {
    for (int width = count / 2; width > 0; width /= 2) {
      for (int j = first; j < first + width * step; j += step) {
        lanes[j].rest += lanes[j + width * step].rest;
        lanes[j].above += lanes[j + width * step].above;
      }
    }
  };
  for (int first = 0; first < kSplitLanes; first += 32) in_pairs(first, 32, 1);
  in_pairs(0, kSplitLanes / 32, 32);
  return lanes[0];
}

template <class T, class S, class A>
void probabilities(const T* atoms, int64_t n, double budget, T* p, int32_t* failed, int threads, S split, A apply) {
  static_assert(kChunk % kSplitSegment == 0, "a task's parts are its own");
  std::vector<Split> parts(size_t(ceil_div(n, kSplitSegment)));
  Water water{};
  while (to_be_split(water)) {
    const Limits at = split_limits(water);
    parallel_chunks(n, kChunk, threads, [&](int64_t, int64_t begin, int64_t end) {
      split(atoms + begin, end - begin, at, parts.data() + begin / kSplitSegment);
    });
    fill_water(&water, combine(parts), budget);
  }
  if (water.stage == Filling::failed) {
    *failed = 1;
    return;
  }
  parallel_chunks(n, kChunk, threads,
                  [&](int64_t, int64_t begin, int64_t end) { apply(atoms + begin, end - begin, water, p + begin); });
}

}  // namespace

void atom_probabilities_float(const float* atoms, int64_t n, double budget, float* p, int32_t* failed, int threads) {
  probabilities(atoms, n, budget, p, failed, threads, split_floats, apply_floats);
}

void atom_probabilities_double(const double* atoms, int64_t n, double budget, double* p, int32_t* failed, int threads) {
  probabilities(atoms, n, budget, p, failed, threads, split_doubles, apply_doubles);
}

}  // namespace gradzip::cpu
