// A threshold that keeps about k: binary search on a random sample, then one count over all of the data. A sample that
// misses is replaced by one four times as large; after the last, or if its threshold is 0, the selection is exact.
#include <algorithm>
#include <vector>

#include "common/philox.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace gradzip::cpu {
namespace {

GZ_INLINE int64_t at_least_body(const uint32_t* bits, int64_t n, uint32_t threshold) {
  uint32_t count = 0;
  for (int64_t i = 0; i < n; ++i) count += (bits[i] & 0x7fffffffu) >= threshold;
  return count;
}
GZ_SIMD_DISPATCH(int64_t, at_least, (const uint32_t* bits, int64_t n, uint32_t threshold), (bits, n, threshold))

int64_t count_all(const uint32_t* bits, int64_t n, uint32_t threshold, int threads) {
  std::vector<int64_t> counts(ceil_div(n, kChunk));
  parallel_chunks(n, kChunk, threads, [&](int64_t chunk, int64_t begin, int64_t end) {
    counts[chunk] = at_least(bits + begin, end - begin, threshold);
  });
  int64_t total = 0;
  for (int64_t c : counts) total += c;
  return total;
}

std::vector<uint32_t> draw(const uint32_t* bits, int64_t n, int64_t size, uint64_t key, uint64_t counter) {
  std::vector<uint32_t> sample(size);
  for (int64_t i = 0; i < size; i += 4) {
    const Philox4 random = philox(key, counter + uint64_t(i) / 4);
    for (int64_t j = 0; j < 4; ++j) sample[i + j] = bits[sampled_index(random.v[j], n)];
  }
  return sample;
}

// The largest threshold that at least `wanted` of the sample reach, found bit by bit.
uint32_t search(const std::vector<uint32_t>& sample, int64_t wanted) {
  uint32_t threshold = 0;
  for (int bit = 30; bit >= 0; --bit) {
    const uint32_t higher = threshold | 1u << bit;
    if (at_least(sample.data(), int64_t(sample.size()), higher) >= wanted) threshold = higher;
  }
  return threshold;
}

// Returns the number of elements selected.
int64_t find(const float* x, int64_t n, int64_t k, uint64_t key, Selection* selection, int threads) {
  const auto* bits = reinterpret_cast<const uint32_t*>(x);
  int64_t size = first_sample(n, k);
  uint64_t counter = 0;
  for (int round = 0; round < kSampleRounds && sample_pays(size, n); ++round, size *= 4) {
    const auto sample = draw(bits, n, size, key, counter);
    counter += uint64_t(size) / 4;
    const uint32_t threshold = search(sample, sampled_rank(n, k, size));
    if (threshold == 0) break;  // mostly zeros
    const int64_t count = count_all(bits, n, threshold, threads);
    if (close_enough(count, k)) {
      *selection = {bits_float(threshold), 0, n};
      return count;
    }
  }
  select(x, n, k, selection, threads);
  if ((float_bits(selection->threshold) & 0x7fffffffu) != 0) return k;
  *selection = {bits_float(1), 0, n};  // fewer than k are nonzero: keep those
  return count_all(bits, n, 1, threads);
}

}  // namespace

void select_sampled(const SampledSource* table, int64_t count, int threads) {
  parallel_pieces(
      count, threads, [&](int64_t i) { return table[i].n; },
      [&](int64_t i, int of_piece) {
        const auto [x, n, k, key, selection, found] = table[i];
        *found = find(x, n, k, key, selection, of_piece);
      });
}

}  // namespace gradzip::cpu
