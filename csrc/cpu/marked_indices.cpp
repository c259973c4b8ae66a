// Where a bitmap's bits are set, and the values there, in one walk.
#include "cpu/bitmap.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace gradzip::cpu {
namespace {

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

int64_t marked_indices(const uint8_t* bitmap, int64_t n, const float* x, int64_t count, int32_t* indices, float* values,
                       int threads) {
  const auto offsets = bitmap_offsets(bitmap, n, threads);
  if (offsets.back() != count) return -1;
  parallel_chunks(n, kChunk, threads, [&](int64_t c, int64_t begin, int64_t end) {
    walk(bitmap + begin / 8, end - begin, begin, x ? x + begin : nullptr, indices + offsets[c],
         x ? values + offsets[c] : nullptr);
  });
  return count;
}

}  // namespace gradzip::cpu
