// The result of a top-k selection.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace gradzip {

// All of |x| above `threshold`, and the first `ties` of those equal to it. NaN counts as larger than infinity.
struct Selection {
  float threshold;
  int32_t unused;
  int64_t ties;
};
static_assert(sizeof(Selection) == 16, "gradzip/ops/select.py reads it");

// A vector of n elements, where the selection of about k of them goes, and their number. key: of the samples.
struct SampledSource {
  const float* x;
  int64_t n, k;
  uint64_t key;
  Selection* selection;
  int64_t* count;
};
static_assert(sizeof(SampledSource) == 48, "gradzip/ops/groups.py writes it");

// Sampling for about k of n: each sample is four times as large as the one before, until one is close enough or
// sampling costs as much as reading all of the data.
constexpr int64_t kSampleHits = 400;  // expected in the sample above the threshold: 5 % standard deviation
constexpr int64_t kLeastSample = 1 << 12, kMostSample = 1 << 18;
constexpr int kSampleRounds = 3;

GZ_HD int64_t first_sample(int64_t n, int64_t k) {
  const double wanted = double(kSampleHits) / (double(k) / double(n));
  int64_t size = wanted < double(kMostSample) ? int64_t(wanted) : kMostSample;
  size = size < n / 8 ? size : n / 8;
  return size < kLeastSample ? kLeastSample : size / 4 * 4;
}
GZ_HD bool sample_pays(int64_t size, int64_t n) { return size <= n / 4; }

// The rank in the sample that corresponds to rank k of n.
GZ_HD int64_t sampled_rank(int64_t n, int64_t k, int64_t size) {
  const int64_t rank = int64_t(double(k) / double(n) * double(size) + 0.5);
  return rank > 1 ? rank : 1;
}
GZ_HD bool close_enough(int64_t count, int64_t k) { return 10 * count >= 9 * k && 10 * count <= 11 * k; }

// The index, of n < 2^32, that a draw of 32 bits picks.
GZ_HD int64_t sampled_index(uint32_t draw, int64_t n) { return int64_t((uint64_t(draw) * uint64_t(n)) >> 32); }

}  // namespace gradzip
