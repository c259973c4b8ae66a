#include "cpu/abs_max.h"

#include <vector>

#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace gradzip::cpu {
namespace {

// Compared as integers: magnitudes have the same order, and every NaN is above infinity, so one maximum finds both.
GZ_INLINE uint32_t abs_max_bits_body(const float* x, int64_t n) {
  uint32_t most = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = float_bits(x[i]) & 0x7fffffffu;
    most = most > magnitude ? most : magnitude;
  }
  return most;
}
GZ_SIMD_DISPATCH(uint32_t, abs_max_bits, (const float* x, int64_t n), (x, n))

// 16-bit floats order as their bits do, too.
template <class T>
GZ_INLINE T abs_max_half(const T* x, int64_t n) {
  uint16_t most = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint16_t magnitude = x[i].bits & 0x7fffu;
    most = most > magnitude ? most : magnitude;
  }
  return {most};
}
GZ_INLINE BFloat16 abs_max_bfloat16_body(const BFloat16* x, int64_t n) { return abs_max_half(x, n); }
GZ_INLINE Float16 abs_max_float16_body(const Float16* x, int64_t n) { return abs_max_half(x, n); }
GZ_SIMD_DISPATCH(BFloat16, abs_max_bfloat16, (const BFloat16* x, int64_t n), (x, n))
GZ_SIMD_DISPATCH(Float16, abs_max_float16, (const Float16* x, int64_t n), (x, n))

// most[l] = max |x[i]| over i % width == l.
GZ_INLINE void fold_body(const float* x, int64_t n, int64_t width, uint32_t* most) {
  for (int64_t at = 0; at < n; at += width) {
    const int64_t count = n - at < width ? n - at : width;
    for (int64_t l = 0; l < count; ++l) {
      const uint32_t magnitude = float_bits(x[at + l]) & 0x7fffffffu;
      most[l] = most[l] > magnitude ? most[l] : magnitude;
    }
  }
}
GZ_SIMD_DISPATCH(void, fold, (const float* x, int64_t n, int64_t width, uint32_t* most), (x, n, width, most))

void columns_of(const Matrix& matrix, float* most) {
  const auto [data, rows, columns] = matrix;
  if (columns == 0) return;
  const int64_t width = ceil_div(32, columns) * columns;  // whole rows: enough for vectors
  std::vector<uint32_t> folded(width, 0);
  fold(data, rows * columns, width, folded.data());
  for (int64_t c = 0; c < columns; ++c) {
    uint32_t bits = 0;
    for (int64_t l = c; l < width; l += columns) bits = bits > folded[l] ? bits : folded[l];
    most[c] = bits_float(bits);
  }
}

}  // namespace

uint32_t abs_max_here(const float* x, int64_t n) { return abs_max_bits(x, n); }
uint32_t abs_max_here(const BFloat16* x, int64_t n) { return float_bits(to_float(abs_max_bfloat16(x, n))); }
uint32_t abs_max_here(const Float16* x, int64_t n) { return float_bits(to_float(abs_max_float16(x, n))); }

void abs_max(const void* x, int dtype, int64_t n, float* most, int threads) {
  std::vector<uint32_t> partial(ceil_div(n, kChunk), 0);
  typed(x, dtype, [&](auto* of) {
    parallel_chunks(n, kChunk, threads, [&](int64_t chunk, int64_t begin, int64_t end) {
      partial[chunk] = abs_max_here(of + begin, end - begin);
    });
  });
  uint32_t bits = 0;
  for (uint32_t p : partial) bits = bits > p ? bits : p;
  *most = bits_float(bits);
}

void abs_max_columns(const Matrix* matrices, int64_t count, int dtype, float* most, int threads) {
  if (Dtype(dtype) != Dtype::float32) {
    for (int64_t i = 0; i < count; ++i) abs_max(matrices[i].data, dtype, matrices[i].rows, most + i, threads);
    return;
  }
  std::vector<int64_t> offset(count + 1, 0);
  for (int64_t i = 0; i < count; ++i) offset[i + 1] = offset[i] + matrices[i].columns;
  parallel_for(count, threads, [&](int64_t i) { columns_of(matrices[i], most + offset[i]); });
}

}  // namespace gradzip::cpu
