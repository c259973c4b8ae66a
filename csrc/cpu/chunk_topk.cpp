// A chunk is small enough for the L1 cache. The k-th largest of the maxima of groups of its elements is a lower bound of
// its k-th largest element, which few others reach: only these are partitioned.
#include "common/chunk_topk.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>

#include "cpu/half.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace gradzip::cpu {
namespace {

// Writes the magnitudes, as bits, which order as magnitudes do, with every NaN above infinity. maxima[j] is the largest of
// the elements j, j + groups, j + 2 * groups, ...; groups is a multiple of 16, n at least as large.
GZ_INLINE void group_maxima_body(const float* x, int n, int groups, uint32_t* magnitudes, uint32_t* maxima) {
  for (int i = 0; i < n; ++i) magnitudes[i] = float_bits(x[i]) & 0x7fffffffu;
  std::memcpy(maxima, magnitudes, size_t(groups) * 4);
  int begin = groups;
  for (; begin + groups <= n; begin += groups)
    for (int j = 0; j < groups; ++j) maxima[j] = std::max(maxima[j], magnitudes[begin + j]);
  for (int j = 0; begin + j < n; ++j) maxima[j] = std::max(maxima[j], magnitudes[begin + j]);
}
GZ_SIMD_DISPATCH(void, group_maxima, (const float* x, int n, int groups, uint32_t* magnitudes, uint32_t* maxima),
                 (x, n, groups, magnitudes, maxima))

// The indices of the magnitudes that reach `least`, ascending. Returns their number. `out` has room for n + 16.
int candidates_scalar(const uint32_t* magnitudes, int n, uint32_t least, int32_t* out) {
  int found = 0;
  for (int i = 0; i < n; ++i) {
    out[found] = i;
    found += magnitudes[i] >= least;
  }
  return found;
}

GZ_AVX2 int candidates_avx2(const uint32_t* magnitudes, int n, uint32_t least, int32_t* out) {
  const __m256i below = _mm256_set1_epi32(int(least) - 1);  // as signed numbers: magnitudes have no top bit
  int found = 0, i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256i m = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(magnitudes + i));
    for (int reach = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(m, below))); reach; reach &= reach - 1)
      out[found++] = i + __builtin_ctz(unsigned(reach));
  }
  for (; i < n; ++i)
    if (magnitudes[i] >= least) out[found++] = i;
  return found;
}

GZ_AVX512 int candidates_avx512(const uint32_t* magnitudes, int n, uint32_t least, int32_t* out) {
  const __m512i limit = _mm512_set1_epi32(int(least));
  __m512i indices = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  int found = 0, i = 0;
  for (; i + 16 <= n; i += 16, indices = _mm512_add_epi32(indices, _mm512_set1_epi32(16))) {
    const __mmask16 reach = _mm512_cmpge_epu32_mask(_mm512_loadu_si512(magnitudes + i), limit);
    if (reach) {
      _mm512_storeu_si512(out + found, _mm512_maskz_compress_epi32(reach, indices));
      found += __builtin_popcount(reach);
    }
  }
  for (; i < n; ++i)
    if (magnitudes[i] >= least) out[found++] = i;
  return found;
}

GZ_SIMD_SELECT(int, candidates, (const uint32_t* magnitudes, int n, uint32_t least, int32_t* out),
               (magnitudes, n, least, out))

uint32_t kth_largest(uint32_t* m, int n, int k) {
  std::nth_element(m, m + (k - 1), m + n, std::greater<uint32_t>());
  return m[k - 1];
}

// The k largest of n <= kMostChunk elements, 1 <= k <= n; ties to the lower index. Writes their indices, ascending, and
// their magnitudes.
void largest_of_chunk(const float* x, int n, int k, int32_t* kept, uint32_t* kept_magnitudes) {
  uint32_t magnitudes[kMostChunk], some[kMostChunk];
  int32_t found[kMostChunk + 16];
  int groups = 64;
  while (groups < 4 * k) groups *= 2;
  int count = n;
  if (groups <= n / 2) {
    group_maxima(x, n, groups, magnitudes, some);
    count = candidates(magnitudes, n, kth_largest(some, groups, k), found);
  } else {
    for (int i = 0; i < n; ++i) magnitudes[i] = float_bits(x[i]) & 0x7fffffffu, found[i] = i;
  }
  for (int i = 0; i < count; ++i) some[i] = magnitudes[found[i]];
  const uint32_t threshold = kth_largest(some, count, k);
  int64_t equal = k - std::count_if(some, some + k, [=](uint32_t m) { return m > threshold; });
  for (int i = 0, next = 0; next < k; ++i) {
    const uint32_t m = magnitudes[found[i]];
    if (m < threshold || (m == threshold && equal-- <= 0)) continue;
    kept[next] = found[i];
    kept_magnitudes[next++] = m;
  }
}

// Writes the `words` of a record. Returns the one with its levels.
uint32_t encode(const float* x, const int32_t* kept, const uint32_t* magnitudes, int count, int64_t words,
                uint8_t* record) {
  uint32_t word[1 + kMostChunk / 16] = {}, shares[kMostChunk];
  const uint32_t largest = *std::max_element(magnitudes, magnitudes + count);
  const ChunkUnit unit = chunk_unit(largest);
  uint64_t sum = 0, high_sum = 0, high_count = 0;
  if (largest < kInfBits) {
    for (int i = 0; i < count; ++i) sum += shares[i] = chunk_share(magnitudes[i], unit);
    for (int i = 0; i < count; ++i) {
      const bool high = above_mean(shares[i], sum, uint64_t(count));
      high_sum += high ? shares[i] : 0;
      high_count += high;
      const uint32_t negative = float_bits(x[kept[i]]) >> 31;
      word[1 + i / 16] |= (uint32_t(high) | negative << 1) << (2 * (i % 16));
    }
  }
  word[0] = chunk_levels(largest, sum, uint64_t(count), high_sum, high_count);
  std::memcpy(record, word, size_t(words) * 4);
  return word[0];
}

template <class T>
void encode_chunks(const T* x, const ChunkSource& of, int64_t chunk, float* most, int threads) {
  const int64_t words = chunk_words(of.k), chunks = ceil_div(of.n, chunk);
  std::atomic<int64_t> largest{0};
  parallel_chunks(chunks, std::max<int64_t>(1, kChunk / chunk), threads, [&](int64_t, int64_t begin, int64_t end) {
    uint32_t magnitudes[kMostChunk], levels = 0;
    float buffer[kMostChunk];
    for (int64_t c = begin; c < end; ++c) {
      const int64_t first = c * chunk;
      const int size = int(std::min(chunk, of.n - first)), count = int(chunk_count(size, chunk, of.k));
      int32_t* kept = of.indices + c * of.k;
      const float* values = as_floats(x + first, size, buffer);
      largest_of_chunk(values, size, count, kept, magnitudes);
      levels = std::max(levels, encode(values, kept, magnitudes, count, words, of.records + c * words * 4));
      for (int i = 0; i < count; ++i) kept[i] += int32_t(first);
    }
    raise(&largest, levels);
  });
  if (most) *most = bits_float(uint32_t(largest));
}

// Returns whether all levels are those of finite numbers.
bool decode_chunks(const ChunkRecords& of, int64_t chunk, int threads) {
  const int64_t words = chunk_words(of.k);
  std::atomic<bool> valid{true};
  parallel_chunks(ceil_div(of.n, chunk), std::max<int64_t>(1, kChunk / of.k), threads,
                  [&](int64_t, int64_t begin, int64_t end) {
                    for (int64_t c = begin; c < end; ++c) {
                      uint32_t word[1 + kMostChunk / 16];
                      const int count = int(chunk_count(std::min(chunk, of.n - c * chunk), chunk, of.k));
                      std::memcpy(word, of.records + c * words * 4, size_t(words) * 4);
                      if (!valid_levels(word[0])) valid.store(false, std::memory_order_relaxed);
                      for (int i = 0; i < count; ++i)
                        of.values[c * of.k + i] = chunk_value(word[1 + i / 16] >> (2 * (i % 16)), word[0]);
                    }
                  });
  return valid;
}

}  // namespace

void chunk_topk(const ChunkSource* table, int64_t count, int dtype, int64_t chunk, float* most, int threads) {
  parallel_pieces(
      count, threads, [&](int64_t i) { return table[i].n; },
      [&](int64_t i, int of_piece) {
        typed(table[i].x, dtype,
              [&](auto* x) { encode_chunks(x, table[i], chunk, most ? most + i : nullptr, of_piece); });
      });
}

void chunk_topk_values(const ChunkRecords* table, int64_t count, int64_t chunk, int32_t* failed, int threads) {
  std::atomic<int64_t> first_invalid{count};
  parallel_pieces(
      count, threads, [&](int64_t i) { return table[i].n; },
      [&](int64_t i, int of_piece) {
        if (!decode_chunks(table[i], chunk, of_piece)) lower(&first_invalid, i);
      });
  if (first_invalid < count) *failed = int32_t(first_invalid) + 1;
}

}  // namespace gradzip::cpu
