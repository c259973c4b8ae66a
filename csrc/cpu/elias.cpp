#include "cpu/elias.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "common/quantize.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace gradzip::cpu {
namespace {

constexpr int kMaskWords = int(kEliasChunk / 64);

// Which levels are not zero, 64 to a word. `levels` is zero up to the next multiple of 64.
void nonzero_scalar(const int32_t* levels, int words, uint64_t* masks) {
  for (int w = 0; w < words; ++w, levels += 64) {
    masks[w] = 0;
    for (int j = 0; j < 64; ++j) masks[w] |= uint64_t(levels[j] != 0) << j;
  }
}
GZ_AVX2 void nonzero_avx2(const int32_t* levels, int words, uint64_t* masks) {
  for (int w = 0; w < words; ++w, levels += 64) {
    uint64_t zero = 0;
    for (int j = 0; j < 8; ++j) {
      const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(levels + 8 * j));
      const __m256 equal = _mm256_castsi256_ps(_mm256_cmpeq_epi32(v, _mm256_setzero_si256()));
      zero |= uint64_t(uint32_t(_mm256_movemask_ps(equal))) << (8 * j);
    }
    masks[w] = ~zero;
  }
}
GZ_AVX512 void nonzero_avx512(const int32_t* levels, int words, uint64_t* masks) {
  for (int w = 0; w < words; ++w, levels += 64) {
    masks[w] = 0;
    for (int j = 0; j < 4; ++j) {
      const __m512i v = _mm512_loadu_si512(levels + 16 * j);
      masks[w] |= uint64_t(_mm512_test_epi32_mask(v, v)) << (16 * j);
    }
  }
}
GZ_SIMD_SELECT(void, nonzero, (const int32_t* levels, int words, uint64_t* masks), (levels, words, masks))

GZ_INLINE EliasCode gamma(uint32_t v) { return gamma_code(v, 31 - __builtin_clz(v)); }

// Writes 8 bytes at a time: up to 8 beyond the end.
struct BitWriter {
  uint8_t* at;
  uint64_t pending = 0;
  int filled = 0;  // below 8 between calls

  GZ_INLINE void put(uint64_t bits, int length) {  // length <= 57
    pending |= bits << filled;
    std::memcpy(at, &pending, 8);
    filled += length;
    at += filled / 8;
    pending = filled == 64 ? 0 : pending >> (filled & ~7);
    filled %= 8;
  }
};

// Returns the bytes written.
GZ_INLINE int64_t write_chunk_body(const int32_t* levels, int64_t count, const uint64_t* masks, uint8_t* out) {
  BitWriter writer{out};
  int64_t next = 0;  // the first element that is not coded yet
  for (int64_t begin = 0; begin < count; begin += 64) {
    for (uint64_t word = masks[begin / 64]; word; word &= word - 1) {
      const int64_t i = begin + __builtin_ctzll(word);
      const int32_t level = levels[i];
      const EliasCode token =
          level_token(gamma(uint32_t(i - next + 1)), level < 0, gamma(uint32_t(level < 0 ? -level : level)));
      writer.put(token.bits, token.length);
      next = i + 1;
    }
  }
  if (next < count) {
    const EliasCode run = gamma(uint32_t(count - next + 1));
    writer.put(run.bits, run.length);
  }
  return writer.at - out + (writer.filled > 0);
}
GZ_SIMD_DISPATCH(int64_t, write_chunk, (const int32_t* levels, int64_t count, const uint64_t* masks, uint8_t* out),
                 (levels, count, masks, out))

// 57 bits or more from `bit` on; what lies past the end reads as 0.
GZ_INLINE uint64_t window(const uint8_t* stream, int64_t nbytes, int64_t bit) {
  const int64_t byte = bit / 8, left = nbytes - byte;
  uint64_t word = 0;
  if (__builtin_expect(left >= 8, 1))
    std::memcpy(&word, stream + byte, 8);
  else if (left > 0)
    std::memcpy(&word, stream + byte, size_t(left));
  return word >> (bit % 8);
}

// Every token takes at least one element and is checked before it is used, so any bytes end here, within `levels`.
GZ_INLINE bool read_chunk_body(const uint8_t* stream, int64_t nbytes, int64_t count, int32_t top, int32_t* levels) {
  std::memset(levels, 0, size_t(count) * sizeof *levels);
  int64_t bit = 0, next = 0;
  while (next < count) {
    uint64_t word = window(stream, nbytes, bit);
    const int k = word ? __builtin_ctzll(word) : 64;
    if (k > 12) return false;  // more zeros than a chunk has elements
    next += int64_t(1 << k | (word >> (k + 1) & ((1u << k) - 1))) - 1;
    bit += 2 * k + 1;
    if (next >= count) break;
    word >>= 2 * k + 1;
    const bool negative = word & 1;
    word >>= 1;
    const int m = word ? __builtin_ctzll(word) : 64;
    if (m > 15) return false;
    const int32_t level = int32_t(1u << m | (uint32_t(word >> (m + 1)) & ((1u << m) - 1)));
    if (level > top) return false;
    levels[next++] = negative ? -level : level;
    bit += 2 * m + 2;
  }
  return next == count && ceil_div(bit, 8) == nbytes;
}
GZ_SIMD_DISPATCH(bool, read_chunk, (const uint8_t* stream, int64_t nbytes, int64_t count, int32_t top, int32_t* levels),
                 (stream, nbytes, count, top, levels))

// Chunks coded at a time: enough to keep threads busy, few enough for what they wrote to stay in the cache until it is
// moved to where it belongs.
constexpr int64_t kTogether = 256;

}  // namespace

int64_t elias_write(int64_t n, int bits, uint8_t* out, int64_t capacity, int threads,
                    const std::function<bool(int64_t, int64_t, int32_t*)>& levels_of) {
  const int64_t chunks = ceil_div(n, kEliasChunk), slot = kEliasChunk * (2 * bits - 1) / 8 + 16;
  std::unique_ptr<uint8_t[]> scratch(new uint8_t[size_t(std::min(chunks, kTogether) * slot)]);
  int64_t sizes[kTogether], total = 2 * chunks;
  if (total > capacity) return -2;
  std::atomic<bool> valid{true};
  for (int64_t first = 0; first < chunks; first += kTogether) {
    const int64_t many = std::min(kTogether, chunks - first);
    parallel_for(many, threads, [&](int64_t c) {
      const int64_t begin = (first + c) * kEliasChunk, count = std::min(kEliasChunk, n - begin);
      int32_t levels[kEliasChunk];
      uint64_t masks[kMaskWords];
      const int words = int(ceil_div(count, 64));
      std::fill(levels + count, levels + 64 * words, 0);
      if (!levels_of(begin, begin + count, levels)) {
        valid = false;
        return;
      }
      nonzero(levels, words, masks);
      sizes[c] = write_chunk(levels, count, masks, scratch.get() + c * slot);
    });
    if (!valid) return -1;
    for (int64_t c = 0; c < many; ++c) {
      if (sizes[c] > capacity - total) return -2;
      const uint16_t size = uint16_t(sizes[c]);
      std::memcpy(out + 2 * (first + c), &size, 2);
      std::memcpy(out + total, scratch.get() + c * slot, size_t(sizes[c]));
      total += sizes[c];
    }
  }
  return total;
}

bool elias_read(const uint8_t* stream, int64_t nbytes, int64_t n, int32_t top, int threads,
                const std::function<void(int64_t, int64_t, const int32_t*)>& take) {
  const int64_t chunks = ceil_div(n, kEliasChunk);
  if (nbytes < 2 * chunks) return false;
  std::vector<int64_t> offsets(chunks + 1, 2 * chunks);
  for (int64_t c = 0; c < chunks; ++c) {
    uint16_t size;
    std::memcpy(&size, stream + 2 * c, 2);
    offsets[c + 1] = offsets[c] + size;
  }
  if (offsets[chunks] != nbytes) return false;
  std::atomic<bool> valid{true};
  parallel_for(chunks, threads, [&](int64_t c) {
    const int64_t begin = c * kEliasChunk, count = std::min(kEliasChunk, n - begin);
    int32_t levels[kEliasChunk];
    if (read_chunk(stream + offsets[c], offsets[c + 1] - offsets[c], count, top, levels))
      take(begin, begin + count, levels);
    else
      valid = false;
  });
  return valid;
}

int64_t elias_encode(const int32_t* codes, int64_t n, uint8_t* out, int64_t capacity, int threads) {
  return elias_write(n, 17, out, capacity, threads, [&](int64_t begin, int64_t end, int32_t* levels) {
    int32_t beyond = 0;
    for (int64_t i = begin; i < end; ++i) beyond |= int32_t(codes[i] > kEliasTop) | int32_t(codes[i] < -kEliasTop);
    std::copy(codes + begin, codes + end, levels);
    return beyond == 0;
  });
}

int elias_decode(const uint8_t* stream, int64_t nbytes, int64_t n, int32_t top, int32_t* codes, int threads) {
  const bool valid =
      elias_read(stream, nbytes, n, top, threads, [&](int64_t begin, int64_t end, const int32_t* levels) {
        std::copy(levels, levels + (end - begin), codes + begin);
      });
  return valid ? 0 : -1;
}

}  // namespace gradzip::cpu
