#include "common/bernoulli.h"

#include <algorithm>

#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/philox.h"
#include "cpu/sign_bits.h"
#include "cpu/simd.h"

namespace gradzip::cpu {
namespace {

constexpr int64_t kDrawBlock = 1024;

// One sign bit per element.
GZ_INLINE void compare_body(const float* p, const uint32_t* random, int n, float* drawn) {
  for (int i = 0; i < n; ++i) drawn[i] = is_drawn(p[i], random[i]) ? -1.0f : 1.0f;
}
GZ_SIMD_DISPATCH(void, compare, (const float* p, const uint32_t* random, int n, float* drawn), (p, random, n, drawn))

}  // namespace

void bernoulli(const float* p, int64_t n, uint64_t key, uint8_t* bitmap, int threads) {
  parallel_chunks(n, kChunk, threads, [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += kDrawBlock) {
      const int count = int(std::min(end - i, kDrawBlock));
      uint32_t random[kDrawBlock];
      float drawn[kDrawBlock];
      philox_words(key, uint64_t(i), count, random);
      compare(p + i, random, count, drawn);
      write_signs(drawn, 0, count, 0, bitmap + i / 8);
    }
  });
}

}  // namespace gradzip::cpu
