// Prefix-sum packing (HPDC'20, section 3.2): items whose bit is set are moved to the offset given by the prefix sum of
// the bitmap. Chunks are counted first, which gives the offset of each chunk's output.
#include <cstring>
#include <vector>

#include "cpu/bitmap.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace gradzip::cpu {
namespace {

// Gathers the items whose bit is set. The vector forms write up to a register past the last item, in a buffer on the
// stack, so that they never touch the output of other chunks.
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
  gather_body(x, n, bitmap, out);  // few bits are set as a rule: iterating over them is hard to beat
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
  if (staged) std::memcpy(out, stage, size_t(staged) * sizeof(T));  // `out` may be null if nothing is kept
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
void compact_items(const T* x, int64_t n, const uint8_t* bitmap, T* out, int64_t capacity, int64_t* found,
                   int threads) {
  const auto offsets = bitmap_offsets(bitmap, n, threads);
  *found = offsets.back();
  if (*found > capacity) return;
  parallel_chunks(n, kChunk, threads, [&](int64_t c, int64_t begin, int64_t end) {
    gather(x + begin, end - begin, bitmap + begin / 8, out + offsets[c]);
  });
}

template <class T>
void expand_items(const T* values, int64_t count, const uint8_t* bitmap, T* out, int64_t n, int64_t* found,
                  int threads) {
  const auto offsets = bitmap_offsets(bitmap, n, threads);
  *found = offsets.back();
  if (*found != count) return;
  parallel_chunks(n, kChunk, threads, [&](int64_t c, int64_t begin, int64_t end) {
    scatter(values + offsets[c], end - begin, bitmap + begin / 8, out + begin);
  });
}

}  // namespace

void compact(const void* values, int64_t n, int item_size, const uint8_t* bitmap, void* out, int64_t capacity,
             int64_t* found, int threads) {
  if (item_size == 4)
    compact_items(static_cast<const uint32_t*>(values), n, bitmap, static_cast<uint32_t*>(out), capacity, found,
                  threads);
  else
    compact_items(static_cast<const uint64_t*>(values), n, bitmap, static_cast<uint64_t*>(out), capacity, found,
                  threads);
}

void compact_expand(const void* values, int64_t count, int item_size, const uint8_t* bitmap, void* out, int64_t n,
                    int64_t* found, int threads) {
  if (item_size == 4)
    expand_items(static_cast<const uint32_t*>(values), count, bitmap, static_cast<uint32_t*>(out), n, found, threads);
  else
    expand_items(static_cast<const uint64_t*>(values), count, bitmap, static_cast<uint64_t*>(out), n, found, threads);
}

}  // namespace gradzip::cpu
