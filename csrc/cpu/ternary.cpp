// Ternary gradients (TernGrad), five trits to a byte.
#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "common/ternary.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/philox.h"
#include "cpu/simd.h"

namespace gradzip::cpu {
namespace {

constexpr int64_t kTritChunk = 100 * kTritBlock;

int width_of(int64_t n) { return int(ceil_div(n, kDigits)); }

GZ_INLINE void draw_trits_body(const float* x, const uint32_t* random, int n, LevelScale scale, float clip,
                               uint8_t* trits) {
  for (int i = 0; i < n; ++i) trits[i] = uint8_t(draw_trit(x[i], scale, clip, random[i]));
}
GZ_SIMD_DISPATCH(void, draw_trits,
                 (const float* x, const uint32_t* random, int n, LevelScale scale, float clip, uint8_t* trits),
                 (x, random, n, scale, clip, trits))

GZ_INLINE void join_trits_body(const uint8_t* trits, int width, uint8_t* bytes) {
  for (int j = 0; j < width; ++j) {
    const uint8_t *t = trits + j, *u = t + 2 * width;
    bytes[j] = uint8_t(t[0] + 3 * t[width] + 9 * (u[0] + 3 * u[width] + 9 * u[2 * width]));
  }
}
GZ_SIMD_DISPATCH(void, join_trits, (const uint8_t* trits, int width, uint8_t* bytes), (trits, width, bytes))

GZ_INLINE void add_trits_body(const uint8_t* bytes, int width, int n, float value, float* out) {
  uint16_t rest[kTritWidth];
  for (int j = 0; j < width; ++j) rest[j] = bytes[j];
  for (int begin = 0; begin < n; begin += width) {
    const int count = n - begin < width ? n - begin : width;
    int32_t sign[kTritWidth];
    for (int j = 0; j < width; ++j) {
      const uint16_t left = uint16_t(third(rest[j]));
      const int32_t trit = rest[j] - 3 * left;
      sign[j] = (trit & 1) - (trit >> 1);
      rest[j] = left;
    }
    for (int j = 0; j < count; ++j) out[begin + j] += value * float(sign[j]);
  }
}
GZ_SIMD_DISPATCH(void, add_trits, (const uint8_t* bytes, int width, int n, float value, float* out),
                 (bytes, width, n, value, out))

GZ_INLINE uint8_t largest_byte_body(const uint8_t* bytes, int64_t n) {
  uint8_t most = 0;
  for (int64_t i = 0; i < n; ++i) most = most > bytes[i] ? most : bytes[i];
  return most;
}
GZ_SIMD_DISPATCH(uint8_t, largest_byte, (const uint8_t* bytes, int64_t n), (bytes, n))

}  // namespace

void ternary_packed(const float* x, int64_t n, const float* scale, const float* clip, uint64_t key, uint8_t* packed,
                    int threads) {
  const LevelScale level = level_scale(*scale, 1);
  const float most = clip ? *clip : std::numeric_limits<float>::infinity();
  parallel_chunks(n, kTritChunk, threads, [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += kTritBlock) {
      const int count = int(std::min<int64_t>(end - i, kTritBlock)), width = width_of(count);
      uint32_t random[kTritBlock];
      uint8_t trits[kTritBlock];
      philox_words(key, uint64_t(i), count, random);
      draw_trits(x + i, random, count, level, most, trits);
      std::fill(trits + count, trits + kDigits * width, uint8_t(0));
      join_trits(trits, width, packed + i / kDigits);
    }
  });
}

void ternary_decode_add(const uint8_t* packed, int64_t n, const float* scale, double weight, float* out,
                        int32_t* failed, int threads) {
  const float factor = scale ? *scale : 1.0f, value = float(weight * double(factor));
  bool valid = valid_norm(factor);
  std::vector<uint8_t> most(ceil_div(n, kTritChunk), 0);
  parallel_chunks(n, kTritChunk, threads, [&](int64_t chunk, int64_t begin, int64_t end) {
    most[chunk] = largest_byte(packed + begin / kDigits, width_of(end - begin));
  });
  for (uint8_t m : most) valid &= m <= kTopByte;
  if (!valid) {
    *failed = 1;
    return;
  }
  parallel_chunks(n, kTritChunk, threads, [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += kTritBlock) {
      const int count = int(std::min<int64_t>(end - i, kTritBlock));
      add_trits(packed + i / kDigits, width_of(count), count, value, out + i);
    }
  });
}

}  // namespace gradzip::cpu
