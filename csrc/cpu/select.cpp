// The exact k-th largest magnitude, as a rule in one read of the data: a sample brackets the threshold, one pass counts
// the values above the bracket and collects the few inside it, and the threshold is found among those. If the bracket
// misses or holds too many values (ties), a radix select on the bits finds it in three reads of any data.
#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <utility>
#include <vector>

#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace gradzip::cpu {
namespace {

constexpr int64_t kDirect = 1 << 13;  // up to this size, all of the data is the sample

int64_t sample_size(int64_t n) { return std::clamp<int64_t>(n / 32, 1 << 11, 1 << 15); }

GZ_INLINE uint32_t magnitude(float x) { return float_bits(x) & 0x7fffffffu; }

struct Bracket {
  uint32_t low, high;  // magnitudes as bits; low <= high
};

// Appends the values in [low, high] to `inside` (which has room for n + 16), sets `kept` to their number, and returns
// the number of values above.
int64_t split_scalar(const float* x, int64_t n, Bracket bracket, uint32_t* inside, int64_t* kept) {
  int64_t above = 0, k = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t m = magnitude(x[i]);
    above += m > bracket.high;
    inside[k] = m;
    k += m >= bracket.low && m <= bracket.high;
  }
  *kept = k;
  return above;
}

GZ_AVX2 int64_t split_avx2(const float* x, int64_t n, Bracket bracket, uint32_t* inside, int64_t* kept) {
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  const __m256i low = _mm256_set1_epi32(int(bracket.low) - 1), high = _mm256_set1_epi32(int(bracket.high));
  int64_t above = 0, k = 0, i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256i m = _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i)), mask);
    const int over = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(m, high)));
    const int reach = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(m, low)));
    above += __builtin_popcount(over);
    for (int rest = reach & ~over; rest; rest &= rest - 1) inside[k++] = magnitude(x[i + __builtin_ctz(rest)]);
  }
  int64_t tail = 0;
  above += split_scalar(x + i, n - i, bracket, inside + k, &tail);
  *kept = k + tail;
  return above;
}

GZ_AVX512 int64_t split_avx512(const float* x, int64_t n, Bracket bracket, uint32_t* inside, int64_t* kept) {
  const __m512i mask = _mm512_set1_epi32(0x7fffffff);
  const __m512i low = _mm512_set1_epi32(int(bracket.low)), high = _mm512_set1_epi32(int(bracket.high));
  int64_t above = 0, k = 0, i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m512i m = _mm512_and_si512(_mm512_loadu_si512(x + i), mask);
    const __mmask16 over = _mm512_cmpgt_epu32_mask(m, high);
    const __mmask16 in = _mm512_mask_cmple_epu32_mask(_mm512_cmpge_epu32_mask(m, low), m, high);
    above += __builtin_popcount(over);
    if (in) {  // compress in a register: the store form is microcoded on some processors
      _mm512_storeu_si512(inside + k, _mm512_maskz_compress_epi32(in, m));
      k += __builtin_popcount(in);
    }
  }
  int64_t tail = 0;
  above += split_scalar(x + i, n - i, bracket, inside + k, &tail);
  *kept = k + tail;
  return above;
}

GZ_SIMD_SELECT(int64_t, split, (const float* x, int64_t n, Bracket bracket, uint32_t* inside, int64_t* kept),
               (x, n, bracket, inside, kept))

// The k-th largest of m (which is reordered) and the number of larger values.
struct Found {
  uint32_t value;
  int64_t above;
};
Found kth_largest(std::vector<uint32_t>& m, int64_t k) {
  int64_t above = 0;
  if (m.size() > 4096) {  // a histogram finds the few values that it may be, faster than partitions of them all
    constexpr int kBins = 2048;
    const auto [low, high] = std::minmax_element(m.begin(), m.end());
    const uint32_t least = *low;
    int shift = 0;
    while ((*high - least) >> shift >= kBins) ++shift;
    std::array<int64_t, kBins> histogram{};
    for (uint32_t u : m) ++histogram[(u - least) >> shift];
    int bin = kBins - 1;
    for (; above + histogram[bin] < k; --bin) above += histogram[bin];
    m.erase(std::remove_if(m.begin(), m.end(), [=](uint32_t u) { return int((u - least) >> shift) != bin; }), m.end());
    k -= above;
  }
  std::nth_element(m.begin(), m.begin() + (k - 1), m.end(), std::greater<uint32_t>());
  const uint32_t value = m[k - 1];
  return {value, above + std::count_if(m.begin(), m.begin() + (k - 1), [=](uint32_t u) { return u > value; })};
}

// Sampling positions without a random generator: steps of the golden ratio, so that no period of the data (rows of a
// transform, channels) coincides with the sampling.
std::vector<uint32_t> sample(const float* x, int64_t n) {
  std::vector<uint32_t> s(sample_size(n));
  uint64_t position = 0;
  for (auto& m : s) {
    m = magnitude(x[uint64_t((static_cast<unsigned __int128>(position) * uint64_t(n)) >> 64)]);
    position += 0x9E3779B97F4A7C15ull;
  }
  return s;
}

// A bracket that holds the k-th largest of n with probability 1 - 1e-6; nothing if it would hold too many values.
bool bracket_by_sample(const float* x, int64_t n, int64_t k, Bracket* bracket) {
  const auto s = sample(x, n);
  const auto size = int64_t(s.size());
  const double share = double(k) / double(n);
  const double centre = share * double(size), margin = 5.0 * std::sqrt(centre * (1.0 - share)) + 4.0;
  const int64_t first = int64_t(centre - margin), last = int64_t(centre + margin);
  const auto ranked = [&](int64_t rank) {
    std::vector<uint32_t> copy = s;
    return kth_largest(copy, rank + 1).value;
  };
  bracket->high = first < 0 ? 0x7fffffffu : ranked(first);
  bracket->low = last >= size ? 0u : ranked(last);
  const auto inside =
      std::count_if(s.begin(), s.end(), [=](uint32_t m) { return m >= bracket->low && m <= bracket->high; });
  return bracket->low == bracket->high || inside < size / 4;
}

// Radix select on the bits: 11, 10 and 10 of them a pass.
Found radix_select(const float* x, int64_t n, int64_t k, int threads) {
  uint32_t prefix = 0, prefix_mask = 0;
  int64_t above = 0;
  for (const auto& [shift, bins] : {std::pair{20, 2048}, std::pair{10, 1024}, std::pair{0, 1024}}) {
    const int64_t chunk = std::max<int64_t>(kChunk, ceil_div(n, 64));  // bounds the histograms' memory
    std::vector<std::array<int64_t, 2048>> histograms(ceil_div(n, chunk));
    parallel_chunks(n, chunk, threads, [&, shift = shift, bins = bins](int64_t c, int64_t begin, int64_t end) {
      auto& histogram = histograms[c];
      histogram.fill(0);
      for (int64_t i = begin; i < end; ++i) {
        const uint32_t m = magnitude(x[i]);
        if ((m & prefix_mask) == prefix) ++histogram[(m >> shift) & uint32_t(bins - 1)];
      }
    });
    int bin = bins;
    for (int64_t here = 0;; above += here) {
      here = 0;
      --bin;
      for (const auto& histogram : histograms) here += histogram[bin];
      if (above + here >= k) break;
    }
    prefix |= uint32_t(bin) << shift;
    prefix_mask |= uint32_t(bins - 1) << shift;
  }
  return {prefix, above};
}

Found find(const float* x, int64_t n, int64_t k, int threads) {
  if (n <= kDirect) {
    std::vector<uint32_t> m(n);
    for (int64_t i = 0; i < n; ++i) m[i] = magnitude(x[i]);
    return kth_largest(m, k);
  }
  Bracket bracket;
  if (bracket_by_sample(x, n, k, &bracket)) {
    struct Part {
      int64_t above = 0, inside = 0;
      std::vector<uint32_t> values;
    };
    std::vector<Part> parts(ceil_div(n, kChunk));
    parallel_chunks(n, kChunk, threads, [&](int64_t c, int64_t begin, int64_t end) {
      static thread_local std::vector<uint32_t> scratch(kChunk + 16);
      Part& part = parts[c];
      part.above = split(x + begin, end - begin, bracket, scratch.data(), &part.inside);
      // A bracket of a single value, which may be nearly all of the data, needs its count only.
      if (bracket.low != bracket.high) part.values.assign(scratch.begin(), scratch.begin() + part.inside);
    });
    int64_t above = 0, inside = 0;
    for (const Part& part : parts) above += part.above, inside += part.inside;
    if (above < k && k <= above + inside) {
      if (bracket.low == bracket.high) return {bracket.low, above};
      std::vector<uint32_t> m;
      m.reserve(inside);
      for (const Part& part : parts) m.insert(m.end(), part.values.begin(), part.values.end());
      const Found found = kth_largest(m, k - above);
      return {found.value, above + found.above};
    }
  }
  return radix_select(x, n, k, threads);
}

}  // namespace

void select(const float* x, int64_t n, int64_t k, Selection* selection, int threads) {
  const Found found = find(x, n, k, threads);
  *selection = {bits_float(found.value), 0, k - found.above};
}

}  // namespace gradzip::cpu
