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

}  // namespace

void abs_max(const float* x, int64_t n, float* most, int threads) {
  std::vector<uint32_t> partial(ceil_div(n, kChunk), 0);
  parallel_chunks(n, kChunk, threads, [&](int64_t chunk, int64_t begin, int64_t end) {
    partial[chunk] = abs_max_bits(x + begin, end - begin);
  });
  uint32_t bits = 0;
  for (uint32_t p : partial) bits = bits > p ? bits : p;
  *most = bits_float(bits);
}

}  // namespace gradzip::cpu
