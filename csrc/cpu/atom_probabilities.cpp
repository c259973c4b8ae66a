// ATOMO's probabilities (Wang et al., NeurIPS 2018, Algorithm 1) without sorting all atoms.
//
// p_i = min(1, c |a_i|) with sum p = s. Algorithm 1 takes atoms from the largest on and gives p = 1 while c |a_i| > 1 for
// the c that the others would get. Doing so with all such atoms at once, and again with the smaller threshold that
// leaves, ends at the same set: each round only adds atoms that belong to it. Gradients need a handful of rounds; what
// needs more (magnitudes that fall geometrically) is sorted.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace gradzip::cpu {
namespace {

constexpr int kRounds = 32;
constexpr int kLanes = 16;

// Of the magnitudes: how many are above a threshold, and the sum of the others, times `unit`.
struct Split {
  int64_t above;
  double rest;
};

template <class T>
GZ_INLINE Split split_loop(const T* atoms, int64_t n, double unit, double threshold) {
  double rest[kLanes] = {};
  int64_t above[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) {
      const double m = std::fabs(double(atoms[i + j])) * unit;
      rest[j] += m > threshold ? 0.0 : m;
      above[j] += m > threshold;
    }
  }
  for (int j = 0; i < n; ++i, ++j) {
    const double m = std::fabs(double(atoms[i])) * unit;
    rest[j] += m > threshold ? 0.0 : m;
    above[j] += m > threshold;
  }
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) {
      rest[j] += rest[j + width];
      above[j] += above[j + width];
    }
  }
  return {above[0], rest[0]};
}
GZ_INLINE Split split_floats_body(const float* atoms, int64_t n, double unit, double threshold) {
  return split_loop(atoms, n, unit, threshold);
}
GZ_INLINE Split split_doubles_body(const double* atoms, int64_t n, double unit, double threshold) {
  return split_loop(atoms, n, unit, threshold);
}
GZ_SIMD_DISPATCH(Split, split_floats, (const float* atoms, int64_t n, double unit, double threshold),
                 (atoms, n, unit, threshold))
GZ_SIMD_DISPATCH(Split, split_doubles, (const double* atoms, int64_t n, double unit, double threshold),
                 (atoms, n, unit, threshold))
Split split_chunk(const float* atoms, int64_t n, double unit, double t) { return split_floats(atoms, n, unit, t); }
Split split_chunk(const double* atoms, int64_t n, double unit, double t) { return split_doubles(atoms, n, unit, t); }

template <class T>
Split split(const T* atoms, int64_t n, double unit, double threshold, int threads) {
  std::vector<Split> parts(ceil_div(n, kChunk));
  parallel_chunks(n, kChunk, threads, [&](int64_t chunk, int64_t begin, int64_t end) {
    parts[chunk] = split_chunk(atoms + begin, end - begin, unit, threshold);
  });
  Split all{0, 0.0};
  for (const Split& part : parts) {
    all.above += part.above;
    all.rest += part.rest;
  }
  return all;
}

// -1 where an atom is not finite.
template <class T>
double largest(const T* atoms, int64_t n, int threads) {
  std::vector<double> parts(ceil_div(n, kChunk));
  parallel_chunks(n, kChunk, threads, [&](int64_t chunk, int64_t begin, int64_t end) {
    T most = 0;
    bool finite = true;
    for (int64_t i = begin; i < end; ++i) {
      most = std::max(most, std::fabs(atoms[i]));
      finite &= std::fabs(atoms[i]) <= std::numeric_limits<T>::max();
    }
    parts[chunk] = finite ? double(most) : -1.0;
  });
  double most = 0.0;
  for (double part : parts) {
    if (part < 0.0) return part;
    most = std::max(most, part);
  }
  return most;
}

// What decides: atoms above `threshold` have p = 1, the others p = factor * magnitude.
struct Water {
  double threshold, factor;
};

// Algorithm 1 as it stands, for the atoms that are not above the threshold yet.
template <class T>
Water by_sorting(const T* atoms, int64_t n, double unit, double threshold, double budget) {
  std::vector<double> magnitudes;
  for (int64_t i = 0; i < n; ++i) {
    const double m = std::fabs(double(atoms[i])) * unit;
    if (m > threshold)
      budget -= 1.0;
    else if (m > 0.0)
      magnitudes.push_back(m);
  }
  std::sort(magnitudes.begin(), magnitudes.end());
  std::vector<double> sums(magnitudes.size() + 1, 0.0);  // of the smallest ones: no cancellation
  for (size_t i = 0; i < magnitudes.size(); ++i) sums[i + 1] = sums[i] + magnitudes[i];
  for (size_t i = magnitudes.size(); i > 0 && magnitudes[i - 1] * budget > sums[i]; --i) {
    threshold = std::nextafter(magnitudes[i - 1], 0.0);
    budget -= 1.0;
    magnitudes.pop_back();
  }
  const double rest = sums[magnitudes.size()];
  return {threshold, rest > 0.0 && budget > 0.0 ? budget / rest : 0.0};
}

template <class T>
Water fill(const T* atoms, int64_t n, double unit, double budget, int threads) {
  Water water{std::numeric_limits<double>::infinity(), 0.0};
  for (int64_t round = 0, above = -1; round < kRounds; ++round) {
    const Split now = split(atoms, n, unit, water.threshold, threads);
    const double left = budget - double(now.above);
    if (left <= 0.0 || now.rest <= 0.0) return {water.threshold, 0.0};
    water.factor = left / now.rest;
    if (now.above == above) return water;
    above = now.above;
    water.threshold = std::min(water.threshold, now.rest / left);
  }
  return by_sorting(atoms, n, unit, water.threshold, budget);
}

template <class T>
int probabilities(const T* atoms, int64_t n, double budget, T* p, int threads) {
  const double most = largest(atoms, n, threads);
  if (most < 0.0) return -1;
  const bool enough = double(split(atoms, n, 1.0, 0.0, threads).above) <= budget;
  // A power of two by which sums of doubles do not overflow, and denormal ones have all their bits.
  const double unit = enough ? 1.0 : most > 0x1p900 ? 0x1p-64 : most < 0x1p-900 ? 0x1p512 : 1.0;
  const Water water = enough ? Water{0.0, 0.0} : fill(atoms, n, unit, budget, threads);
  parallel_chunks(n, kChunk, threads, [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const double m = std::fabs(double(atoms[i])) * unit;
      p[i] = T(m > water.threshold ? 1.0 : std::min(1.0, m * water.factor));
    }
  });
  return 0;
}

}  // namespace

int atom_probabilities_float(const float* atoms, int64_t n, double budget, float* p, int threads) {
  return probabilities(atoms, n, budget, p, threads);
}

int atom_probabilities_double(const double* atoms, int64_t n, double budget, double* p, int threads) {
  return probabilities(atoms, n, budget, p, threads);
}

}  // namespace gradzip::cpu
