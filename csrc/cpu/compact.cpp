// Prefix-sum packing (HPDC'20, section 3.2): a status bitmap, its prefix sum, and the marked items moved to where the
// sum says. Chunks are counted first, so that each knows where its output begins.
#include <cstring>
#include <vector>

#include "cpu/bitmap.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace gradzip::cpu {
namespace {

static_assert(kChunk % 64 == 0, "a chunk of the bitmap is whole words");

// Bits of 64 values: which are at least the threshold, and which equal it. Magnitudes as integers: NaN is largest.
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

// Writes the bitmap of n values; returns the counts of set bits and of equals.
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

// Clears all but the first `quota` of the chunk's equals.
void drop_ties(const float* x, int64_t n, uint32_t threshold, int64_t quota, uint8_t* bitmap) {
  for (int64_t i = 0; i < n; ++i) {
    if ((float_bits(x[i]) & 0x7fffffffu) != threshold) continue;
    if (quota-- <= 0) bitmap[i / 8] &= uint8_t(~(1u << (i % 8)));
  }
}

// Items whose bit is set, moved together. The wide forms write up to a register beyond the last item, within a buffer
// on the stack, so that neighbours' output is never touched.
template <class T>
GZ_INLINE int64_t gather_word(const T* x, uint64_t word, T* out) {
  int64_t k = 0;
  for (; word; word &= word - 1) out[k++] = x[__builtin_ctzll(word)];
  return k;
}

template <class T>
GZ_INLINE void gather_body(const T* x, int64_t n, const uint8_t* bitmap, T* out) {
  for (int64_t i = 0; i < n; i += 64) out += gather_word(x + i, load_word(bitmap, i, n), out);
}

GZ_AVX512 GZ_INLINE int64_t gather_full_word(const uint32_t* x, uint64_t word, uint32_t* out) {
  int64_t k = 0;
  for (int j = 0; j < 4; ++j, word >>= 16) {
    _mm512_storeu_si512(out + k, _mm512_maskz_compress_epi32(__mmask16(word), _mm512_loadu_si512(x + 16 * j)));
    k += __builtin_popcount(uint32_t(word & 0xffff));
  }
  return k;
}
GZ_AVX512 GZ_INLINE int64_t gather_full_word(const uint64_t* x, uint64_t word, uint64_t* out) {
  int64_t k = 0;
  for (int j = 0; j < 8; ++j, word >>= 8) {
    _mm512_storeu_si512(out + k, _mm512_maskz_compress_epi64(__mmask8(word), _mm512_loadu_si512(x + 8 * j)));
    k += __builtin_popcount(uint32_t(word & 0xff));
  }
  return k;
}

template <class T>
void gather_scalar(const T* x, int64_t n, const uint8_t* bitmap, T* out) {
  gather_body(x, n, bitmap, out);
}
template <class T>
GZ_AVX2 void gather_avx2(const T* x, int64_t n, const uint8_t* bitmap, T* out) {
  gather_body(x, n, bitmap, out);  // few bits are set as a rule: jumping from one to the next is hard to beat
}
template <class T>
GZ_AVX512 void gather_avx512(const T* x, int64_t n, const uint8_t* bitmap, T* out) {
  constexpr int64_t kStage = 1024;
  T stage[kStage + 64 + 16];
  int64_t staged = 0, i = 0;
  for (; i + 64 <= n; i += 64) {
    uint64_t word;
    std::memcpy(&word, bitmap + i / 8, 8);
    staged += gather_full_word(x + i, word, stage + staged);
    if (staged >= kStage) {
      std::memcpy(out, stage, size_t(staged) * sizeof(T));
      out += staged;
      staged = 0;
    }
  }
  if (staged) std::memcpy(out, stage, size_t(staged) * sizeof(T));  // `out` may be null where nothing is kept
  gather_body(x + i, n - i, bitmap + i / 8, out + staged);
}

template <class T>
GZ_SIMD_SELECT(void, gather, (const T* x, int64_t n, const uint8_t* bitmap, T* out), (x, n, bitmap, out))

template <class T>
GZ_INLINE void scatter_body(const T* values, int64_t n, const uint8_t* bitmap, T* out) {
  std::memset(out, 0, size_t(n) * sizeof(T));
  for (int64_t i = 0; i < n; i += 64)
    for (uint64_t word = load_word(bitmap, i, n); word; word &= word - 1) out[i + __builtin_ctzll(word)] = *values++;
}
template <class T>
void scatter_scalar(const T* values, int64_t n, const uint8_t* bitmap, T* out) {
  scatter_body(values, n, bitmap, out);
}
template <class T>
GZ_AVX2 void scatter_avx2(const T* values, int64_t n, const uint8_t* bitmap, T* out) {
  scatter_body(values, n, bitmap, out);
}
GZ_AVX512 GZ_INLINE void scatter_full_word(const uint32_t* values, uint64_t word, uint32_t* out) {
  for (int j = 0; j < 4; ++j, word >>= 16) {
    _mm512_storeu_si512(out + 16 * j, _mm512_maskz_expandloadu_epi32(__mmask16(word), values));
    values += __builtin_popcount(uint32_t(word & 0xffff));
  }
}
GZ_AVX512 GZ_INLINE void scatter_full_word(const uint64_t* values, uint64_t word, uint64_t* out) {
  for (int j = 0; j < 8; ++j, word >>= 8) {
    _mm512_storeu_si512(out + 8 * j, _mm512_maskz_expandloadu_epi64(__mmask8(word), values));
    values += __builtin_popcount(uint32_t(word & 0xff));
  }
}
template <class T>
GZ_AVX512 void scatter_avx512(const T* values, int64_t n, const uint8_t* bitmap, T* out) {
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    uint64_t word;
    std::memcpy(&word, bitmap + i / 8, 8);
    scatter_full_word(values, word, out + i);
    values += __builtin_popcountll(word);
  }
  scatter_body(values, n - i, bitmap + i / 8, out + i);
}

template <class T>
GZ_SIMD_SELECT(void, scatter, (const T* values, int64_t n, const uint8_t* bitmap, T* out), (values, n, bitmap, out))

template <class T>
int64_t compact_items(const T* x, int64_t n, const uint8_t* bitmap, T* out, int64_t capacity, int threads) {
  const auto offsets = bitmap_offsets(bitmap, n, threads);
  if (offsets.back() > capacity) return -1;
  parallel_chunks(n, kChunk, threads, [&](int64_t c, int64_t begin, int64_t end) {
    gather(x + begin, end - begin, bitmap + begin / 8, out + offsets[c]);
  });
  return offsets.back();
}

template <class T>
int64_t expand_items(const T* values, int64_t count, const uint8_t* bitmap, T* out, int64_t n, int threads) {
  const auto offsets = bitmap_offsets(bitmap, n, threads);
  if (offsets.back() != count) return -1;
  parallel_chunks(n, kChunk, threads, [&](int64_t c, int64_t begin, int64_t end) {
    scatter(values + offsets[c], end - begin, bitmap + begin / 8, out + begin);
  });
  return count;
}

GZ_INLINE int64_t popcount_body(const uint8_t* bitmap, int64_t n) {
  int64_t set = 0;
  for (int64_t i = 0; i < n; i += 64) set += __builtin_popcountll(load_word(bitmap, i, n));
  return set;
}
GZ_SIMD_DISPATCH(int64_t, popcount, (const uint8_t* bitmap, int64_t n), (bitmap, n))

}  // namespace

std::vector<int64_t> bitmap_offsets(const uint8_t* bitmap, int64_t n, int threads) {
  std::vector<int64_t> offsets(ceil_div(n, kChunk) + 1, 0);
  parallel_chunks(n, kChunk, threads, [&](int64_t c, int64_t begin, int64_t end) {
    offsets[c + 1] = popcount(bitmap + begin / 8, end - begin);
  });
  for (size_t c = 1; c < offsets.size(); ++c) offsets[c] += offsets[c - 1];
  return offsets;
}

int64_t bitmap(const float* x, int64_t n, const Selection& selection, uint8_t* bitmap, int threads) {
  const uint32_t threshold = float_bits(selection.threshold) & 0x7fffffffu;  // -0 is 0
  std::vector<Counts> counts(ceil_div(n, kChunk));
  parallel_chunks(n, kChunk, threads, [&](int64_t c, int64_t begin, int64_t end) {
    counts[c] = mark(x + begin, end - begin, threshold, bitmap + begin / 8);
  });
  int64_t set = 0, quota = selection.ties;
  for (size_t c = 0; c < counts.size(); ++c) {
    const int64_t begin = int64_t(c) * kChunk, dropped = counts[c].equal - (quota > 0 ? quota : 0);
    if (dropped > 0)
      drop_ties(x + begin, begin + kChunk < n ? kChunk : n - begin, threshold, quota, bitmap + begin / 8);
    set += counts[c].set - (dropped > 0 ? dropped : 0);
    quota -= counts[c].equal;
  }
  return set;
}

int64_t count_marked(const uint8_t* bitmap, int64_t n, int threads) {
  return bitmap_offsets(bitmap, n, threads).back();
}

int64_t compact(const void* values, int64_t n, int item_size, const uint8_t* bitmap, void* out, int64_t capacity,
                int threads) {
  if (item_size == 4)
    return compact_items(static_cast<const uint32_t*>(values), n, bitmap, static_cast<uint32_t*>(out), capacity,
                         threads);
  return compact_items(static_cast<const uint64_t*>(values), n, bitmap, static_cast<uint64_t*>(out), capacity, threads);
}

int64_t expand(const void* values, int64_t count, int item_size, const uint8_t* bitmap, void* out, int64_t n,
               int threads) {
  if (item_size == 4)
    return expand_items(static_cast<const uint32_t*>(values), count, bitmap, static_cast<uint32_t*>(out), n, threads);
  return expand_items(static_cast<const uint64_t*>(values), count, bitmap, static_cast<uint64_t*>(out), n, threads);
}

}  // namespace gradzip::cpu
