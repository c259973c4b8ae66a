// Status bitmaps: which elements a selection keeps, how many there are, and where.
#include "cpu/bitmap.h"

#include <cstring>
#include <vector>

#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace gradzip::cpu {
namespace {

static_assert(kChunk % 64 == 0, "a chunk of the bitmap is whole words");

// For 64 values, which are at least the threshold and which equal it. Magnitudes are compared as integers: NaN is
// largest.
struct Marks {
  uint64_t reach, equal;
};

GZ_INLINE Marks marks_body(const float* x, int count, uint32_t threshold) {
  Marks marks{0, 0};
  for (int i = 0; i < count; ++i) {
    const uint32_t m = float_bits(x[i]) & 0x7fffffffu;
    marks.reach |= uint64_t(m >= threshold) << i;
    marks.equal |= uint64_t(m == threshold) << i;
  }
  return marks;
}

// Results of mark(), which writes the bitmap of n values: the numbers of bits set and of values equal to the threshold.
struct Counts {
  int64_t set, equal;
};

GZ_INLINE void store_word(uint8_t* bitmap, int64_t i, int64_t n, uint64_t word) {
  const int64_t bytes = (n - i + 7) / 8;
  std::memcpy(bitmap + i / 8, &word, bytes < 8 ? size_t(bytes) : 8);
}

Counts mark_scalar(const float* x, int64_t n, uint32_t threshold, uint8_t* bitmap) {
  Counts counts{0, 0};
  for (int64_t i = 0; i < n; i += 64) {
    const Marks marks = marks_body(x + i, int(n - i < 64 ? n - i : 64), threshold);
    counts.set += __builtin_popcountll(marks.reach);
    counts.equal += __builtin_popcountll(marks.equal);
    store_word(bitmap, i, n, marks.reach);
  }
  return counts;
}

GZ_AVX2 Counts mark_avx2(const float* x, int64_t n, uint32_t threshold, uint8_t* bitmap) {
  const __m256i mask = _mm256_set1_epi32(0x7fffffff), at = _mm256_set1_epi32(int(threshold));
  Counts counts{0, 0};
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    uint64_t reach = 0, equal = 0;
    for (int j = 0; j < 8; ++j) {
      const __m256i m = _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i + 8 * j)), mask);
      const __m256i same = _mm256_cmpeq_epi32(m, at);
      const __m256i over = _mm256_or_si256(_mm256_cmpgt_epi32(m, at), same);
      reach |= uint64_t(uint32_t(_mm256_movemask_ps(_mm256_castsi256_ps(over)))) << (8 * j);
      equal |= uint64_t(uint32_t(_mm256_movemask_ps(_mm256_castsi256_ps(same)))) << (8 * j);
    }
    counts.set += __builtin_popcountll(reach);
    counts.equal += __builtin_popcountll(equal);
    std::memcpy(bitmap + i / 8, &reach, 8);
  }
  const Counts rest = mark_scalar(x + i, n - i, threshold, bitmap + i / 8);
  return {counts.set + rest.set, counts.equal + rest.equal};
}

GZ_AVX512 Counts mark_avx512(const float* x, int64_t n, uint32_t threshold, uint8_t* bitmap) {
  const __m512i mask = _mm512_set1_epi32(0x7fffffff), at = _mm512_set1_epi32(int(threshold));
  Counts counts{0, 0};
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    uint64_t reach = 0, equal = 0;
    for (int j = 0; j < 4; ++j) {
      const __m512i m = _mm512_and_si512(_mm512_loadu_si512(x + i + 16 * j), mask);
      reach |= uint64_t(_mm512_cmpge_epu32_mask(m, at)) << (16 * j);
      equal |= uint64_t(_mm512_cmpeq_epu32_mask(m, at)) << (16 * j);
    }
    counts.set += __builtin_popcountll(reach);
    counts.equal += __builtin_popcountll(equal);
    std::memcpy(bitmap + i / 8, &reach, 8);
  }
  const Counts rest = mark_scalar(x + i, n - i, threshold, bitmap + i / 8);
  return {counts.set + rest.set, counts.equal + rest.equal};
}

GZ_SIMD_SELECT(Counts, mark, (const float* x, int64_t n, uint32_t threshold, uint8_t* bitmap),
               (x, n, threshold, bitmap))

// Clears the bits of all but the first `quota` values equal to the threshold.
void drop_ties(const float* x, int64_t n, uint32_t threshold, int64_t quota, uint8_t* bitmap) {
  for (int64_t i = 0; i < n; ++i) {
    if ((float_bits(x[i]) & 0x7fffffffu) != threshold) continue;
    if (quota-- <= 0) bitmap[i / 8] &= uint8_t(~(1u << (i % 8)));
  }
}

GZ_INLINE int64_t popcount_body(const uint8_t* bitmap, int64_t n) {
  int64_t set = 0;
  for (int64_t i = 0; i < n; i += 64) set += __builtin_popcountll(load_word(bitmap, i, n));
  return set;
}
GZ_SIMD_DISPATCH(int64_t, popcount, (const uint8_t* bitmap, int64_t n), (bitmap, n))

GZ_INLINE void walk_body(const uint8_t* bitmap, int64_t n, int64_t first, const float* x, int32_t* indices,
                         float* values) {
  BitRun run;
  for (int64_t i = 0; i < n; i += kBitRun) {
    const int64_t found = set_bits(bitmap, i, n, run);
    for (int64_t j = 0; j < found; ++j) indices[j] = int32_t(first) + run.at[j];
    indices += found;
    if (!x) continue;
    for (int64_t j = 0; j < found; ++j) values[j] = x[run.at[j]];
    values += found;
  }
}
GZ_SIMD_DISPATCH(void, walk,
                 (const uint8_t* bitmap, int64_t n, int64_t first, const float* x, int32_t* indices, float* values),
                 (bitmap, n, first, x, indices, values))

}  // namespace

std::vector<int64_t> bitmap_offsets(const uint8_t* bitmap, int64_t n, int threads) {
  std::vector<int64_t> offsets(ceil_div(n, kChunk) + 1, 0);
  parallel_chunks(n, kChunk, threads, [&](int64_t c, int64_t begin, int64_t end) {
    offsets[c + 1] = popcount(bitmap + begin / 8, end - begin);
  });
  for (size_t c = 1; c < offsets.size(); ++c) offsets[c] += offsets[c - 1];
  return offsets;
}

void walk_bitmap(const uint8_t* bitmap, int64_t n, const std::vector<int64_t>& offsets, const float* x,
                 int32_t* indices, float* values, int threads) {
  parallel_chunks(n, kChunk, threads, [&](int64_t c, int64_t begin, int64_t end) {
    walk(bitmap + begin / 8, end - begin, begin, x ? x + begin : nullptr, indices + offsets[c],
         x ? values + offsets[c] : nullptr);
  });
}

void bitmap(const float* x, int64_t n, const Selection* selection, uint8_t* bitmap, int64_t* count, int threads) {
  const uint32_t threshold = float_bits(selection->threshold) & 0x7fffffffu;  // -0 is 0
  std::vector<Counts> counts(ceil_div(n, kChunk));
  parallel_chunks(n, kChunk, threads, [&](int64_t c, int64_t begin, int64_t end) {
    counts[c] = mark(x + begin, end - begin, threshold, bitmap + begin / 8);
  });
  int64_t set = 0, quota = selection->ties;
  for (size_t c = 0; c < counts.size(); ++c) {
    const int64_t begin = int64_t(c) * kChunk, dropped = counts[c].equal - (quota > 0 ? quota : 0);
    if (dropped > 0)
      drop_ties(x + begin, begin + kChunk < n ? kChunk : n - begin, threshold, quota, bitmap + begin / 8);
    set += counts[c].set - (dropped > 0 ? dropped : 0);
    quota -= counts[c].equal;
  }
  *count = set;
}

void bitmap_count(const uint8_t* bitmap, int64_t n, int64_t* count, int threads) {
  *count = bitmap_offsets(bitmap, n, threads).back();
}

void bitmap_indices(const uint8_t* bitmap, int64_t n, int64_t count, int32_t* indices, int64_t* found, int threads) {
  const auto offsets = bitmap_offsets(bitmap, n, threads);
  *found = offsets.back();
  if (*found == count) walk_bitmap(bitmap, n, offsets, nullptr, indices, nullptr, threads);
}

}  // namespace gradzip::cpu
