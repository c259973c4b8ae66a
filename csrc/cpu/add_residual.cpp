#include "common/add_residual.h"

#include <algorithm>

#include "common/dtype.h"
#include "cpu/half.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace gradzip::cpu {
namespace {

GZ_INLINE void add_body(const float* x, const float* residual, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] + residual[i];
}
GZ_SIMD_DISPATCH(void, add, (const float* x, const float* residual, int64_t n, float* out), (x, residual, n, out))

}  // namespace

void add_residual(const ResidualSum* table, int64_t count, int threads) {
  constexpr int64_t kConverted = 1 << 11;  // elements whose float32 numbers stay in the L1 cache
  const auto chunks = [&](int64_t i) { return ceil_div(table[i].n, kChunk); };
  parallel_table(count, threads, chunks, [&](int64_t i, int64_t chunk) {
    const ResidualSum& sum = table[i];
    const int64_t end = std::min(sum.n, (chunk + 1) * kChunk);
    typed(sum.x, int(sum.dtype), [&](auto* x) {
      float buffer[kConverted];
      for (int64_t begin = chunk * kChunk; begin < end; begin += kConverted) {
        const int64_t many = std::min(end - begin, kConverted);
        add(as_floats(x + begin, many, buffer), sum.residual + begin, many, sum.out + begin);
      }
    });
  });
}

}  // namespace gradzip::cpu
