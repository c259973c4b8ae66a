#include "common/elias.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "cpu/bit_stream.h"
#include "cpu/bucket_norms.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/quantize.h"
#include "cpu/simd.h"

namespace gradzip::cpu {
namespace {

constexpr int kMaskWords = int(kEliasChunk / 64);

// Masks of the nonzero levels, 64 to a word. `levels` is zero up to the next multiple of 64.
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

// Writes 8 bytes at a time: up to 8 past the end.
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
  int64_t next = 0;  // the first element not yet coded
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

// Tokens of up to kTableBits bits, indexed by the next kTableBits bits of the stream.
constexpr int kTableBits = 11;
constexpr int kTokensAtOnce = 57 / kTableBits;  // that a window certainly holds

struct Token {
  uint8_t length = 0;    // 0: longer than kTableBits
  uint8_t elements = 0;  // the zeros and the nonzero level
  int16_t level = 0;
};

struct TokenTable {
  Token of[1 << kTableBits];
  int most_elements = 0;

  constexpr TokenTable() : of{} {
    constexpr int kMost = 1 << kTableBits / 2;
    for (int elements = 1; elements < kMost; ++elements)
      for (int level = 1 - kMost; level < kMost; ++level) {
        if (level == 0) continue;
        const uint32_t magnitude = uint32_t(level < 0 ? -level : level);
        const EliasCode token = level_token(gamma_code(uint32_t(elements), log2(uint32_t(elements))), level < 0,
                                            gamma_code(magnitude, log2(magnitude)));
        if (token.length > kTableBits) continue;
        for (uint64_t word = token.bits; word < 1 << kTableBits; word += uint64_t(1) << token.length)
          of[word] = {uint8_t(token.length), uint8_t(elements), int16_t(level)};
        most_elements = std::max(most_elements, elements);
      }
  }
  static constexpr int log2(uint32_t v) { return v < 2 ? 0 : 1 + log2(v / 2); }
};
constexpr TokenTable kTokens;

// A chunk being read. Terminates for any bytes, and stays within `levels`: a token covers at least one element and is
// checked before use.
struct ChunkReader {
  const uint8_t* stream;
  int64_t nbytes, count;
  int32_t* levels;  // zero-initialised
  int64_t bit = 0, next = 0;
  int32_t largest = 0;

  // Whether kTokensAtOnce tokens of the table fit.
  GZ_INLINE bool room() const {
    return next <= count - kTokensAtOnce * kTokens.most_elements && bit <= 8 * (nbytes - 8);
  }
  GZ_INLINE void put(Token token) {
    bit += token.length;
    next += token.elements;
    levels[next - 1] = token.level;
    largest = std::max<int32_t>(largest, std::abs(token.level));
  }
  // Reads a token; returns false if there is none left or it is invalid.
  GZ_INLINE bool step() {
    if (next >= count) return false;
    uint64_t word = window(stream, nbytes, bit);
    const int k = word ? __builtin_ctzll(word) : 64;
    if (k > 12) return refuse();  // more zeros than a chunk has elements
    next += int64_t(1 << k | (word >> (k + 1) & ((1u << k) - 1))) - 1;
    bit += 2 * k + 1;
    if (next >= count) return false;
    word >>= 2 * k + 1;
    const bool negative = word & 1;
    word >>= 1;
    const int m = word ? __builtin_ctzll(word) : 64;
    if (m > 15) return refuse();
    const int32_t level = int32_t(1u << m | (uint32_t(word >> (m + 1)) & ((1u << m) - 1)));
    largest = std::max(largest, level);
    levels[next++] = negative ? -level : level;
    bit += 2 * m + 2;
    return true;
  }
  GZ_INLINE bool refuse() {
    next = count + 1;
    return false;
  }
  GZ_INLINE bool whole(int32_t top) const { return next == count && largest <= top && ceil_div(bit, 8) == nbytes; }
};

// The position of a token depends on the one before, so reading is bound by latency: two chunks are read side by side.
GZ_INLINE bool read_chunks_body(ChunkReader a, ChunkReader b, int32_t top) {
  // Sparse chunks have long tokens, which are rarely in the table.
  const bool dense = 16 * (a.nbytes + b.nbytes) > a.count + b.count;
  while (dense && a.room() && b.room()) {
    uint64_t of_a = window(a.stream, a.nbytes, a.bit), of_b = window(b.stream, b.nbytes, b.bit);
    for (int j = 0; j < kTokensAtOnce; ++j) {
      const Token next_a = kTokens.of[of_a % (1 << kTableBits)], next_b = kTokens.of[of_b % (1 << kTableBits)];
      if (!next_a.length || !next_b.length) {
        a.step();
        b.step();
        break;
      }
      a.put(next_a);
      b.put(next_b);
      of_a >>= next_a.length;
      of_b >>= next_b.length;
    }
  }
  while (a.step() & b.step()) {
  }
  while (a.step()) {
  }
  while (b.step()) {
  }
  return a.whole(top) && b.whole(top);
}
GZ_SIMD_DISPATCH(bool, read_chunks, (ChunkReader a, ChunkReader b, int32_t top), (a, b, top))

// Chunks coded at a time: enough to keep all threads busy, few enough to stay in the cache until they are moved to
// their place.
constexpr int64_t kTogether = 256;

// Codes n levels that levels_of(begin, end, levels) supplies chunk by chunk, on any thread. It returns false if one is
// beyond the largest of `bits` bits, 2^(bits - 1) - 1 <= kEliasTop. Returns the number of bytes written; -1 if
// levels_of returned false, -2 if the capacity does not suffice.
template <class LevelsOf>
int64_t elias_write(int64_t n, int bits, uint8_t* out, int64_t capacity, int threads, LevelsOf levels_of) {
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

// The inverse: take(begin, end, levels) for each chunk, on any thread. Returns false if the bytes are not a stream of n
// levels of magnitude `top` at most; some chunks may have been taken by then.
template <class Take>
bool elias_read(const uint8_t* stream, int64_t nbytes, int64_t n, int32_t top, int threads, Take take) {
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
  parallel_for(ceil_div(chunks, 2), threads, [&](int64_t pair) {
    int32_t levels[2 * kEliasChunk];
    const int64_t begin = 2 * pair * kEliasChunk, end = std::min(begin + 2 * kEliasChunk, n);
    const int64_t middle = std::min(begin + kEliasChunk, end);
    std::fill(levels, levels + (end - begin), 0);
    const int64_t* offset = &offsets[2 * pair];
    const bool second = middle < end;
    const ChunkReader a{stream + offset[0], offset[1] - offset[0], middle - begin, levels};
    const ChunkReader b{stream + offset[1], second ? offset[2] - offset[1] : 0, end - middle, levels + kEliasChunk};
    if (read_chunks(a, b, top))
      take(begin, end, levels);
    else
      valid = false;
  });
  return valid;
}

GZ_INLINE void add_levels_body(const int32_t* levels, int n, int32_t s, float norm, float weight, float* out) {
  for (int i = 0; i < n; ++i) out[i] += weight * level_value(levels[i], s, norm);
}
GZ_SIMD_DISPATCH(void, add_levels, (const int32_t* levels, int n, int32_t s, float norm, float weight, float* out),
                 (levels, n, s, norm, weight, out))

}  // namespace

void elias_encode(const int32_t* codes, int64_t n, uint8_t* out, int64_t capacity, int64_t* nbytes, int threads) {
  *nbytes = elias_write(n, 17, out, capacity, threads, [&](int64_t begin, int64_t end, int32_t* levels) {
    int32_t beyond = 0;
    for (int64_t i = begin; i < end; ++i) beyond |= int32_t(codes[i] > kEliasTop) | int32_t(codes[i] < -kEliasTop);
    std::copy(codes + begin, codes + end, levels);
    return beyond == 0;
  });
}

void elias_decode(const uint8_t* stream, int64_t nbytes, int64_t n, int32_t top, int32_t* codes, int32_t* failed,
                  int threads) {
  const bool valid =
      elias_read(stream, nbytes, n, top, threads, [&](int64_t begin, int64_t end, const int32_t* levels) {
        std::copy(levels, levels + (end - begin), codes + begin);
      });
  if (!valid) *failed = 1;
}

void elias_quantize(const float* x, int64_t n, int bits, int64_t bucket, int norm, uint64_t key, uint8_t* out,
                    int64_t capacity, float* norms, int64_t* nbytes, int threads) {
  const bool nested = kEliasChunk % bucket == 0;  // a chunk's norms can be computed with it
  if (!nested) bucket_norms(x, n, bucket, norm, norms, threads);
  const Quantizer quantizer{x, norms, bucket, bits, key};
  *nbytes = elias_write(n, bits, out, capacity, threads, [&](int64_t begin, int64_t end, int32_t* levels) {
    if (nested) bucket_norms_here(x + begin, end - begin, bucket, Norm(norm), norms + begin / bucket);
    quantize_levels(quantizer, begin, end, levels);
    return true;
  });
}

void elias_decode_add(const uint8_t* stream, int64_t nbytes, const float* norms, int64_t n, int bits, int64_t bucket,
                      float weight, float* out, int32_t* failed, int threads) {
  const int32_t s = top_level(bits);
  const bool valid = all_norms(norms, ceil_div(n, bucket)) &&
                     elias_read(stream, nbytes, n, s, threads, [&](int64_t begin, int64_t end, const int32_t* levels) {
                       by_bucket(begin, end, bucket, [&](int64_t from, int64_t to, int64_t b) {
                         add_levels(levels + (from - begin), int(to - from), s, norms[b], weight, out + from);
                       });
                     });
  if (!valid) *failed = 1;
}

}  // namespace gradzip::cpu
