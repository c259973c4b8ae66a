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

GZ_INLINE EliasCode gamma(uint32_t v) { return gamma_code(v, 31 - __builtin_clz(v)); }

// Writes 8 bytes at a time: up to 8 past the end.
struct BitWriter {
  uint8_t* at;
  uint64_t pending = 0;
  unsigned filled = 0;  // below 8 between calls

  GZ_INLINE void put(uint64_t bits, unsigned length) {  // length <= 57
    pending |= bits << filled;
    std::memcpy(at, &pending, 8);
    filled += length;
    at += filled / 8;
    pending = filled == 64 ? 0 : pending >> (filled & ~7u);
    filled %= 8;
  }
  // Returns the end of the stream, once the last `zeros` elements of the chunk are coded.
  GZ_INLINE uint8_t* finish(int64_t zeros) {
    if (zeros > 0) {
      const EliasCode run = gamma(uint32_t(zeros + 1));
      put(run.bits, unsigned(run.length));
    }
    return at + (filled > 0);
  }
};

// write_chunk codes a chunk and returns the end of the stream. `levels` is zero up to the next multiple of 64.

// nonzero(levels) is the mask of the nonzero ones of 64 levels.
template <class Nonzero>
GZ_INLINE uint8_t* write_chunk_loop(const int32_t* levels, int64_t count, uint8_t* out, Nonzero nonzero) {
  BitWriter writer{out};
  int64_t next = 0;  // the first element not yet coded
  for (int64_t begin = 0; begin < count; begin += 64) {
    for (uint64_t mask = nonzero(levels + begin); mask; mask &= mask - 1) {
      const int64_t i = begin + __builtin_ctzll(mask);
      const int32_t level = levels[i];
      const EliasCode token =
          level_token(gamma(uint32_t(i - next + 1)), level < 0, gamma(uint32_t(level < 0 ? -level : level)));
      writer.put(token.bits, unsigned(token.length));
      next = i + 1;
    }
  }
  return writer.finish(count - next);
}

GZ_INLINE uint64_t nonzero_scalar(const int32_t* levels) {
  uint64_t mask = 0;
  for (int j = 0; j < 64; ++j) mask |= uint64_t(levels[j] != 0) << j;
  return mask;
}
uint8_t* write_chunk_scalar(const int32_t* levels, int64_t count, uint8_t* out) {
  return write_chunk_loop(levels, count, out, nonzero_scalar);
}

GZ_AVX2 GZ_INLINE uint64_t nonzero_avx2(const int32_t* levels) {
  uint64_t zero = 0;
  for (int j = 0; j < 8; ++j) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(levels + 8 * j));
    const __m256 equal = _mm256_castsi256_ps(_mm256_cmpeq_epi32(v, _mm256_setzero_si256()));
    zero |= uint64_t(uint32_t(_mm256_movemask_ps(equal))) << (8 * j);
  }
  return ~zero;
}
GZ_AVX2 uint8_t* write_chunk_avx2(const int32_t* levels, int64_t count, uint8_t* out) {
  return write_chunk_loop(levels, count, out, nonzero_avx2);
}

// With AVX-512, the nonzero levels are compressed to a list. 16 of them at a time become tokens, which are joined by
// fours in vectors: each step of the writer waits for the one before, so it should take few.

// A word of the list: level * 2^kPositionBits + the position in the chunk, counted from 1.
constexpr int kPositionBits = 13;

// Returns the length of the list. Up to 16 words past it are written.
GZ_AVX512 int list_nonzeros(const int32_t* levels, int64_t count, int32_t* words) {
  int found = 0;
  __m512i position = _mm512_set_epi32(16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1);
  for (int64_t i = 0; i < count; i += 16) {
    const __m512i level = _mm512_loadu_si512(levels + i);
    const __mmask16 nonzero = _mm512_test_epi32_mask(level, level);
    const __m512i word = _mm512_add_epi32(_mm512_slli_epi32(level, kPositionBits), position);
    _mm512_storeu_si512(words + found, _mm512_maskz_compress_epi32(nonzero, word));
    found += __builtin_popcount(nonzero);
    position = _mm512_add_epi32(position, _mm512_set1_epi32(16));
  }
  return found;
}

// Codes in lanes of 32 or 64 bits.
struct Codes {
  __m512i bits, length;
};

// gamma(v) = (2 v + 1 - 2^(k + 1)) << k for k = floor(log2 v), the exponent of v as a float.
GZ_AVX512 GZ_INLINE Codes gammas(__m512i v) {
  const __m512i one = _mm512_set1_epi32(1), bias = _mm512_set1_epi32(127);
  const __m512i k = _mm512_sub_epi32(_mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(v)), 23), bias);
  const __m512i twice = _mm512_sub_epi32(_mm512_slli_epi32(v, 1), _mm512_sllv_epi32(_mm512_set1_epi32(2), k));
  return {_mm512_sllv_epi32(_mm512_add_epi32(twice, one), k), _mm512_add_epi32(_mm512_slli_epi32(k, 1), one)};
}

// Codes a, then b, lane by lane of 64 bits.
GZ_AVX512 GZ_INLINE Codes join(Codes a, Codes b) {
  return {_mm512_or_si512(a.bits, _mm512_sllv_epi64(b.bits, a.length)), _mm512_add_epi64(a.length, b.length)};
}
GZ_AVX512 GZ_INLINE Codes even(Codes c) {
  const __m512i low = _mm512_set1_epi64(0xffffffff);
  return {_mm512_and_si512(c.bits, low), _mm512_and_si512(c.length, low)};
}
GZ_AVX512 GZ_INLINE Codes odd(Codes c) { return {_mm512_srli_epi64(c.bits, 32), _mm512_srli_epi64(c.length, 32)}; }

// Whether one of the chosen codes is too long for the writer, or did not fit its lane.
GZ_AVX512 GZ_INLINE bool too_long(Codes c, __mmask8 chosen) {
  return _mm512_mask_cmpgt_epu64_mask(chosen, c.length, _mm512_set1_epi64(57)) != 0;
}

// Writes every `step`-th of eight codes.
GZ_AVX512 GZ_INLINE void put_codes(BitWriter& writer, Codes c, int step) {
  alignas(64) uint64_t bits[8], length[8];
  _mm512_store_si512(bits, c.bits);
  _mm512_store_si512(length, c.length);
  for (int j = 0; j < 8; j += step) writer.put(bits[j], unsigned(length[j]));
}

GZ_AVX512 uint8_t* write_chunk_avx512(const int32_t* levels, int64_t count, uint8_t* out) {
  int32_t list[1 + kEliasChunk + 16];
  list[0] = 0;
  const int found = list_nonzeros(levels, count, list + 1);
  const __m512i positions = _mm512_set1_epi32((1 << kPositionBits) - 1);
  BitWriter writer{out};
  for (int i = 0; i < found; i += 16) {
    const __m512i before = _mm512_loadu_si512(list + i), word = _mm512_loadu_si512(list + i + 1);
    const __m512i run = _mm512_sub_epi32(_mm512_and_si512(word, positions), _mm512_and_si512(before, positions));
    const __mmask16 here = __mmask16(found - i < 16 ? (1 << (found - i)) - 1 : 0xffff);
    // A token is its run, then its sign and size.
    Codes runs = gammas(run), sizes = gammas(_mm512_abs_epi32(_mm512_srai_epi32(word, kPositionBits)));
    runs = {_mm512_maskz_mov_epi32(here, runs.bits), _mm512_maskz_mov_epi32(here, runs.length)};
    sizes.bits = _mm512_or_si512(_mm512_slli_epi32(sizes.bits, 1), _mm512_srli_epi32(word, 31));
    sizes.length = _mm512_add_epi32(sizes.length, _mm512_set1_epi32(1));
    sizes = {_mm512_maskz_mov_epi32(here, sizes.bits), _mm512_maskz_mov_epi32(here, sizes.length)};
    const Codes first = join(even(runs), even(sizes)), second = join(odd(runs), odd(sizes));
    const Codes pairs = join(first, second);
    const Codes after = {_mm512_unpackhi_epi64(pairs.bits, pairs.bits),
                         _mm512_unpackhi_epi64(pairs.length, pairs.length)};
    const Codes fours = join(pairs, after);
    if (!too_long(fours, 0x55)) {
      put_codes(writer, fours, 2);
    } else if (!too_long(pairs, 0xff)) {
      put_codes(writer, pairs, 1);
    } else {
      alignas(64) uint64_t bits[2][8], length[2][8];
      _mm512_store_si512(bits[0], first.bits);
      _mm512_store_si512(bits[1], second.bits);
      _mm512_store_si512(length[0], first.length);
      _mm512_store_si512(length[1], second.length);
      for (int j = 0; j < 16; ++j) writer.put(bits[j % 2][j / 2], unsigned(length[j % 2][j / 2]));
    }
  }
  return writer.finish(count - (list[found] & ((1 << kPositionBits) - 1)));
}

GZ_SIMD_SELECT(uint8_t*, write_chunk, (const int32_t* levels, int64_t count, uint8_t* out), (levels, count, out))

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

// Chunks that one task codes, and tasks of a round: enough to keep all threads busy, few enough that their bytes stay
// in the cache until the next round moves them to their place.
constexpr int64_t kTogether = 4, kTasks = 128;

// Coded bytes of the tasks of a round, each from the beginning of its slot.
struct Round {
  std::unique_ptr<uint8_t[]> bytes;
  int64_t tasks = 0, sizes[kTasks], offsets[kTasks];  // offsets: in the output
};

// Codes n levels that levels_of(begin, end, levels) supplies chunk by chunk, on any thread. It returns false if one is
// beyond the largest of `bits` bits, 2^(bits - 1) - 1 <= kEliasTop. Returns the number of bytes written; -1 if
// levels_of returned false, -2 if the capacity does not suffice.
template <class LevelsOf>
int64_t elias_write(int64_t n, int bits, uint8_t* out, int64_t capacity, int threads, LevelsOf levels_of) {
  const int64_t chunks = ceil_div(n, kEliasChunk), tasks = ceil_div(chunks, kTogether);
  const int64_t slot = kTogether * (kEliasChunk * (2 * bits - 1) / 8 + 1) + 8;
  int64_t total = 2 * chunks;
  if (total > capacity) return -2;
  std::atomic<bool> valid{true};
  const auto code = [&](int64_t task, uint8_t* to) {
    const uint8_t* start = to;
    const int64_t last = std::min(chunks, (task + 1) * kTogether);
    for (int64_t c = task * kTogether; c < last; ++c) {
      const int64_t begin = c * kEliasChunk, count = std::min(kEliasChunk, n - begin);
      int32_t levels[kEliasChunk];
      std::fill(levels + count, levels + 64 * ceil_div(count, 64), 0);
      if (!levels_of(begin, begin + count, levels)) valid = false;
      uint8_t* end = valid ? write_chunk(levels, count, to) : to;
      const uint16_t size = uint16_t(end - to);
      std::memcpy(out + 2 * c, &size, 2);
      to = end;
    }
    return to - start;
  };
  Round rounds[2];
  for (Round& round : rounds) round.bytes.reset(new uint8_t[size_t(std::min(tasks, kTasks) * slot)]);
  Round *coding = &rounds[0], *moving = &rounds[1];
  for (int64_t first = 0; first < tasks || moving->tasks; first += kTasks) {
    coding->tasks = std::max<int64_t>(0, std::min(kTasks, tasks - first));
    parallel_for(moving->tasks + coding->tasks, threads, [&](int64_t i) {
      if (i < moving->tasks) {
        std::memcpy(out + moving->offsets[i], moving->bytes.get() + i * slot, size_t(moving->sizes[i]));
      } else {
        i -= moving->tasks;
        coding->sizes[i] = code(first + i, coding->bytes.get() + i * slot);
      }
    });
    if (!valid) return -1;
    for (int64_t i = 0; i < coding->tasks; ++i) {
      coding->offsets[i] = total;
      total += coding->sizes[i];
    }
    if (total > capacity) return -2;
    std::swap(coding, moving);
  }
  return total;
}

// Where each chunk of a stream of n levels begins, and the end; empty if the sizes of chunks do not add up to its bytes.
std::vector<int64_t> chunk_offsets(const uint8_t* stream, int64_t nbytes, int64_t n) {
  const int64_t chunks = ceil_div(n, kEliasChunk);
  if (nbytes < 2 * chunks) return {};
  std::vector<int64_t> offsets(size_t(chunks + 1), 2 * chunks);
  for (int64_t c = 0; c < chunks; ++c) {
    uint16_t size;
    std::memcpy(&size, stream + 2 * c, 2);
    offsets[c + 1] = offsets[c] + size;
  }
  if (offsets[chunks] != nbytes) return {};
  return offsets;
}

constexpr int64_t kPair = 2 * kEliasChunk;

// Reads the levels [begin, end) of a stream, a pair of chunks. Returns false unless all are valid, and `top` at most.
bool read_pair(const uint8_t* stream, const std::vector<int64_t>& offsets, int64_t begin, int64_t end, int32_t top,
               int32_t* levels) {
  const int64_t middle = std::min(begin + kEliasChunk, end);
  std::fill(levels, levels + (end - begin), 0);
  const int64_t* offset = &offsets[size_t(begin / kEliasChunk)];
  const bool second = middle < end;
  const ChunkReader a{stream + offset[0], offset[1] - offset[0], middle - begin, levels};
  const ChunkReader b{stream + offset[1], second ? offset[2] - offset[1] : 0, end - middle, levels + (middle - begin)};
  return read_chunks(a, b, top);
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
  const std::vector<int64_t> offsets = chunk_offsets(stream, nbytes, n);
  std::atomic<bool> valid{!offsets.empty()};
  if (valid)
    parallel_chunks(n, kPair, threads, [&](int64_t, int64_t begin, int64_t end) {
      if (!read_pair(stream, offsets, begin, end, top, codes + begin)) valid = false;
    });
  if (!valid) *failed = 1;
}

void elias_quantize(const float* x, int64_t n, int bits, int64_t bucket, int norm, uint64_t key, uint8_t* out,
                    int64_t capacity, float* norms, int64_t* nbytes, int threads) {
  const bool nested = kEliasChunk % bucket == 0;  // a chunk's norms can be computed with it
  if (!nested) bucket_norms(x, int(Dtype::float32), n, bucket, norm, norms, threads);
  const Quantizer<float> quantizer{x, n, norms, bucket, bits, key};
  *nbytes = elias_write(n, bits, out, capacity, threads, [&](int64_t begin, int64_t end, int32_t* levels) {
    if (nested) bucket_norms_here(x + begin, end - begin, bucket, Norm(norm), norms + begin / bucket);
    quantize_levels(quantizer, begin, end, levels);
    return true;
  });
}

void elias_decode_sum(const EliasTerm* terms, int64_t count, int64_t n, int bits, int64_t bucket, float weight,
                      bool add, float* out, int32_t* failed, int threads) {
  const int32_t s = top_level(bits);
  std::vector<std::vector<int64_t>> offsets;
  for (int64_t t = 0; t < count; ++t) {
    offsets.push_back(chunk_offsets(terms[t].bytes, terms[t].nbytes, n));
    if (offsets.back().empty() || !all_norms(terms[t].norms, ceil_div(n, bucket))) {
      *failed = int32_t(t) + 1;
      return;
    }
  }
  std::atomic<int64_t> first_invalid{count};
  parallel_chunks(n, kPair, threads, [&](int64_t, int64_t begin, int64_t end) {
    if (!add) std::fill(out + begin, out + end, 0.0f);
    for (int64_t t = 0; t < count; ++t) {
      int32_t levels[kPair];
      if (!read_pair(terms[t].bytes, offsets[size_t(t)], begin, end, s, levels)) return lower(&first_invalid, t);
      by_bucket(begin, end, bucket, [&](int64_t from, int64_t to, int64_t b) {
        add_levels(levels + (from - begin), int(to - from), s, terms[t].norms[b], weight, out + from);
      });
    }
  });
  if (first_invalid < count) *failed = int32_t(first_invalid) + 1;
}

}  // namespace gradzip::cpu
