// Ternary gradients (TernGrad), five trits to a byte.
#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "common/dtype.h"
#include "common/ternary.h"
#include "cpu/half.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/philox.h"
#include "cpu/simd.h"
#include "cpu/weighted_sum.h"

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

void ternary_packed(const TernarySource* table, int64_t count, const int64_t* replays, int threads) {
  const auto chunks = [&](int64_t i) { return ceil_div(table[i].n, kTritChunk); };
  parallel_table(count, threads, chunks, [&](int64_t t, int64_t chunk) {
    const TernarySource& source = table[t];
    const LevelScale level = level_scale(*source.scale, 1);
    const float most = source.clip ? *source.clip : std::numeric_limits<float>::infinity();
    const uint64_t key = replay_key(source.key, replays);
    const int64_t end = std::min(source.n, (chunk + 1) * kTritChunk);
    typed(source.x, int(source.dtype), [&](auto* x) {
      for (int64_t i = chunk * kTritChunk; i < end; i += kTritBlock) {
        const int n = int(std::min<int64_t>(end - i, kTritBlock)), width = width_of(n);
        uint32_t random[kTritBlock];
        float buffer[kTritBlock];
        uint8_t trits[kTritBlock];
        philox_words(key, uint64_t(i), n, random);
        draw_trits(as_floats(x + i, n, buffer), random, n, level, most, trits);
        std::fill(trits + n, trits + kDigits * width, uint8_t(0));
        join_trits(trits, width, source.packed + i / kDigits);
      }
    });
  });
}

void ternary_decode_add(const WeightedSum* table, int64_t count, const TernaryTerm* terms, int32_t* failed,
                        int threads) {
  *failed = first_invalid(table, count, terms, [&](const WeightedSum& sum, const TernaryTerm& term) {
    const int64_t nbytes = ceil_div(sum.n, kDigits);
    std::vector<uint8_t> most(size_t(ceil_div(nbytes, kChunk)), 0);
    parallel_chunks(nbytes, kChunk, threads, [&](int64_t chunk, int64_t begin, int64_t end) {
      most[size_t(chunk)] = largest_byte(term.packed + begin, end - begin);
    });
    const bool valid = !term.scale || valid_norm(*term.scale);
    return valid && std::all_of(most.begin(), most.end(), [](uint8_t byte) { return byte <= kTopByte; });
  });
  if (*failed) return;
  add_terms(table, count, terms, kTritChunk, 10 * kTritBlock, threads,
            [](const TernaryTerm& term, int64_t begin, int64_t end, float* sum) {
              const float value = float(term.weight * double(term.scale ? *term.scale : 1.0f));
              for (int64_t i = begin; i < end; i += kTritBlock) {
                const int n = int(std::min<int64_t>(end - i, kTritBlock));
                add_trits(term.packed + i / kDigits, width_of(n), n, value, sum + (i - begin));
              }
            });
}

}  // namespace gradzip::cpu
