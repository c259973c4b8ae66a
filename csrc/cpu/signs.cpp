#include <algorithm>
#include <cstring>
#include <mutex>
#include <vector>

#include "common/dtype.h"
#include "common/range_float.h"
#include "cpu/abs_max.h"
#include "cpu/bucket_norms.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/philox.h"
#include "cpu/sign_bits.h"
#include "cpu/simd.h"
#include "cpu/weighted_sum.h"

namespace gradzip::cpu {
namespace {

// Coins made at a time; a draw makes 32.
constexpr int64_t kCoinBlock = 1 << 13;

struct Coins {
  uint64_t words[kCoinBlock / 64 + 1];
  // Those of elements begin to begin + count - 1; begin is a multiple of 128, a whole counter of the generator.
  Coins(uint64_t key, int64_t begin, int64_t count) {
    uint32_t draws[kCoinBlock / 32 + 4];
    const int needed = int(ceil_div(count, 128) * 4);
    philox_words(key, uint64_t(begin) / 32, needed, draws);
    std::memcpy(words, draws, size_t(needed) * 4);
  }
};

// Bits of up to 64 values: negative, and without a sign (as integers: magnitude - 1 wraps for 0).
void sign_words_scalar(const float* x, int64_t n, const uint64_t* coins, uint8_t* packed) {
  for (int64_t i = 0; i < n; i += 64) {
    const int count = int(n - i < 64 ? n - i : 64);
    uint64_t negative = 0, unsigned_ = 0;
    for (int j = 0; j < count; ++j) {
      const uint32_t u = float_bits(x[i + j]);
      negative |= uint64_t(u >> 31) << j;
      unsigned_ |= uint64_t((u & 0x7fffffffu) - 1u >= kInfBits) << j;
    }
    const uint64_t word = (negative & ~unsigned_) | (*coins++ & unsigned_);
    std::memcpy(packed + i / 8, &word, size_t((count + 7) / 8));
  }
}

GZ_AVX2 void sign_words_avx2(const float* x, int64_t n, const uint64_t* coins, uint8_t* packed) {
  const __m256i mask = _mm256_set1_epi32(0x7fffffff), inf = _mm256_set1_epi32(int(kInfBits));
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    uint64_t negative = 0, unsigned_ = 0;
    for (int j = 0; j < 8; ++j) {
      const __m256i u = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i + 8 * j));
      const __m256i m = _mm256_and_si256(u, mask);
      const __m256i none = _mm256_or_si256(_mm256_cmpeq_epi32(m, _mm256_setzero_si256()), _mm256_cmpgt_epi32(m, inf));
      negative |= uint64_t(uint32_t(_mm256_movemask_ps(_mm256_castsi256_ps(u)))) << (8 * j);
      unsigned_ |= uint64_t(uint32_t(_mm256_movemask_ps(_mm256_castsi256_ps(none)))) << (8 * j);
    }
    const uint64_t word = (negative & ~unsigned_) | (*coins++ & unsigned_);
    std::memcpy(packed + i / 8, &word, 8);
  }
  sign_words_scalar(x + i, n - i, coins, packed + i / 8);
}

GZ_AVX512 void sign_words_avx512(const float* x, int64_t n, const uint64_t* coins, uint8_t* packed) {
  const __m512i mask = _mm512_set1_epi32(0x7fffffff), one = _mm512_set1_epi32(1);
  const __m512i inf = _mm512_set1_epi32(int(kInfBits));
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    uint64_t negative = 0, unsigned_ = 0;
    for (int j = 0; j < 4; ++j) {
      const __m512i u = _mm512_loadu_si512(x + i + 16 * j);
      negative |= uint64_t(_mm512_movepi32_mask(u)) << (16 * j);
      unsigned_ |= uint64_t(_mm512_cmpge_epu32_mask(_mm512_sub_epi32(_mm512_and_si512(u, mask), one), inf)) << (16 * j);
    }
    const uint64_t word = (negative & ~unsigned_) | (*coins++ & unsigned_);
    std::memcpy(packed + i / 8, &word, 8);
  }
  sign_words_scalar(x + i, n - i, coins, packed + i / 8);
}

GZ_SIMD_SELECT(void, sign_words, (const float* x, int64_t n, const uint64_t* coins, uint8_t* packed),
               (x, n, coins, packed))

// Works on the bits, which vectorises.
GZ_INLINE void add_pair_body(const uint8_t* packed, int64_t begin, int64_t end, float positive, float negative,
                             float* out) {
  const uint32_t plus = float_bits(positive), flip = plus ^ float_bits(negative);
  int64_t i = begin;
  for (; i < end && i % 32; ++i) out[i] += packed[i / 8] >> (i % 8) & 1 ? negative : positive;
  for (; i + 32 <= end; i += 32) {
    uint32_t word;
    std::memcpy(&word, packed + i / 8, 4);
    for (uint32_t j = 0; j < 32; ++j) out[i + j] += bits_float(plus ^ (flip & (0u - (word >> j & 1u))));
  }
  for (; i < end; ++i) out[i] += packed[i / 8] >> (i % 8) & 1 ? negative : positive;
}
GZ_SIMD_DISPATCH(void, add_pair,
                 (const uint8_t* packed, int64_t begin, int64_t end, float positive, float negative, float* out),
                 (packed, begin, end, positive, negative, out))

// Counters of set bits, bit-sliced: bit j of plane k has weight 2^k in the count of element j.
constexpr int kVoteWords = 64;
constexpr int kPlanes = 16;

struct Counters {
  uint64_t planes[kPlanes][kVoteWords];
};

// A full adder adds two votes to the lowest plane; its carries ripple through the others.
GZ_INLINE void count_votes_body(const uint64_t* a, const uint64_t* b, int used, Counters* counters) {
  uint64_t carry[kVoteWords];
  uint64_t* ones = counters->planes[0];
  for (int j = 0; j < kVoteWords; ++j) {
    const uint64_t differ = a[j] ^ b[j];
    carry[j] = (a[j] & b[j]) | (ones[j] & differ);
    ones[j] ^= differ;
  }
  for (int k = 1; k < used; ++k) {
    uint64_t* plane = counters->planes[k];
    for (int j = 0; j < kVoteWords; ++j) {
      const uint64_t both = plane[j] & carry[j];
      plane[j] ^= carry[j];
      carry[j] = both;
    }
  }
}
GZ_SIMD_DISPATCH(void, count_votes, (const uint64_t* a, const uint64_t* b, int used, Counters* counters),
                 (a, b, used, counters))

// Bits of the counts above `half`; counts equal to it (ties) take their bit from `tie`.
GZ_INLINE void compare_votes_body(const Counters& counters, int used, int half, const uint64_t* tie, uint64_t* won) {
  uint64_t equal[kVoteWords];
  for (int j = 0; j < kVoteWords; ++j) won[j] = 0, equal[j] = ~uint64_t(0);
  for (int k = used - 1; k >= 0; --k) {
    const uint64_t* plane = counters.planes[k];
    const uint64_t wanted = half >> k & 1 ? ~uint64_t(0) : 0;
    for (int j = 0; j < kVoteWords; ++j) {
      won[j] |= equal[j] & plane[j] & ~wanted;
      equal[j] &= ~(plane[j] ^ wanted);
    }
  }
  for (int j = 0; j < kVoteWords; ++j) won[j] |= equal[j] & tie[j];
}
GZ_SIMD_DISPATCH(void, compare_votes,
                 (const Counters& counters, int used, int half, const uint64_t* tie, uint64_t* won),
                 (counters, used, half, tie, won))

GZ_INLINE int64_t count_differences_body(const uint64_t* a, const uint64_t* b, int64_t words) {
  int64_t count = 0;
  for (int64_t j = 0; j < words; ++j) count += __builtin_popcountll(a[j] ^ b[j]);
  return count;
}
GZ_SIMD_DISPATCH(int64_t, count_differences, (const uint64_t* a, const uint64_t* b, int64_t words), (a, b, words))

constexpr int64_t kVoteBlock = 64 * kVoteWords;

// Bits [begin, begin + count) of the vote, count <= kVoteBlock. Adds the votes against it to `against`, unless it is null.
void vote_block(const uint8_t* const* votes, int voters, const SignsVote& vote, uint64_t key, int64_t begin,
                int64_t count, int64_t* against) {
  const size_t bytes = size_t(ceil_div(count, 8));
  const int64_t words = ceil_div(count, 64);
  const uint64_t last = count % 64 ? (uint64_t(1) << (count % 64)) - 1 : ~uint64_t(0);  // of its bits, those below n
  Counters counters;
  uint64_t a[kVoteWords], b[kVoteWords], tie[kVoteWords] = {}, won[kVoteWords];
  int used = 0;
  for (int v = 0; v < voters; v += 2) {
    for (; (std::min(voters, v + 2) >> used) != 0; ++used) std::fill_n(counters.planes[used], kVoteWords, uint64_t(0));
    std::memcpy(a, votes[v] + begin / 8, bytes);
    std::fill_n(b, kVoteWords, uint64_t(0));
    if (v + 1 < voters) std::memcpy(b, votes[v + 1] + begin / 8, bytes);
    count_votes(a, b, used, &counters);
  }
  if (voters % 2 == 0) std::memcpy(tie, Coins(key, begin, count).words, bytes);
  compare_votes(counters, used, voters / 2, tie, won);
  won[words - 1] &= last;
  std::memcpy(vote.packed + begin / 8, won, bytes);
  for (int v = 0; against && v < voters; ++v) {
    a[words - 1] = 0;
    std::memcpy(a, votes[v] + begin / 8, bytes);
    a[words - 1] &= last;
    against[v] += count_differences(a, won, words);
  }
}

}  // namespace

void write_signs(const float* x, int64_t begin, int64_t end, uint64_t key, uint8_t* packed) {
  while (begin < end) {
    const int64_t first = begin / kCoinBlock * kCoinBlock, stop = std::min(end, first + kCoinBlock);
    const Coins coins(key, first, stop - first);
    if (begin % 64) {  // a task may begin at any byte: up to the next word
      const int64_t count = std::min(stop, ceil_div(begin, 64) * 64) - begin;
      const uint64_t shifted = coins.words[(begin - first) / 64] >> (begin % 64);
      sign_words_scalar(x, count, &shifted, packed + begin / 8);
      begin += count;
      x += count;
    }
    sign_words(x, stop - begin, coins.words + (begin - first) / 64, packed + begin / 8);
    x += stop - begin;
    begin = stop;
  }
}

void add_by_sign(const uint8_t* packed, int64_t begin, int64_t end, float positive, float negative, float* out) {
  add_pair(packed, begin, end, positive, negative, out);
}

void signs_pack(const SignsSource* table, int64_t count, const int64_t* replays, float* statistics, int threads) {
  std::vector<int64_t> first(size_t(count) + 1, 0);  // segment of each tensor
  for (int64_t i = 0; i < count; ++i) first[size_t(i) + 1] = first[size_t(i)] + ceil_div(table[i].n, kSumSegment);
  std::vector<SignsPart> parts(statistics ? size_t(first.back()) : 0);
  const auto chunks = [&](int64_t i) { return ceil_div(table[i].n, kChunk); };
  parallel_table(count, threads, chunks, [&](int64_t i, int64_t chunk) {
    const SignsSource& source = table[i];
    const uint64_t own_key = replay_key(source.key, replays);
    const int64_t end = std::min(source.n, (chunk + 1) * kChunk);
    typed(source.x, int(source.dtype), [&](auto* x) {
      for (int64_t begin = chunk * kChunk; begin < end; begin += kSumSegment) {
        const int64_t stop = std::min(end, begin + kSumSegment), count = stop - begin;
        float buffer[kSumSegment];
        const float* values = as_floats(x + begin, count, buffer);
        write_signs(values, begin, stop, own_key, source.packed);
        if (!statistics) continue;
        const double total = norm_part(values, count, Norm::l1);
        parts[size_t(first[size_t(i)] + begin / kSumSegment)] = {total, abs_max_here(values, count)};
      }
    });
  });
  for (int64_t i = 0; statistics && i < count; ++i) {
    SignsPart all{0.0, 0u};
    for (int64_t p = first[size_t(i)]; p < first[size_t(i) + 1]; ++p) {
      all.total += parts[size_t(p)].total;
      all.most = std::max(all.most, parts[size_t(p)].most);
    }
    signs_statistics(all, table[i].n, statistics + 2 * i);
  }
}

void signs_majority(const SignsVote* table, int64_t count, const uint8_t* const* votes, int voters,
                    const int64_t* replays, int64_t* against, int threads) {
  constexpr int64_t kVoteChunk = 8 * kChunk;
  if (against) std::fill_n(against, count * voters, int64_t(0));
  std::mutex adding;
  const auto chunks = [&](int64_t i) { return ceil_div(table[i].n, kVoteChunk); };
  parallel_table(count, threads, chunks, [&](int64_t i, int64_t chunk) {
    const int64_t end = std::min(table[i].n, (chunk + 1) * kVoteChunk);
    const uint64_t key = replay_key(table[i].key, replays);
    std::vector<int64_t> own(against ? size_t(voters) : 0, 0);
    for (int64_t begin = chunk * kVoteChunk; begin < end; begin += kVoteBlock)
      vote_block(votes + i * voters, voters, table[i], key, begin, std::min(end - begin, kVoteBlock),
                 against ? own.data() : nullptr);
    const std::lock_guard<std::mutex> lock(adding);
    for (int v = 0; v < int(own.size()); ++v) against[i * voters + v] += own[size_t(v)];
  });
}

void signs_decode_add(const WeightedSum* table, int64_t count, const SignsTerm* terms, int threads) {
  add_terms(table, count, terms, kChunk, kSumBlock, threads,
            [](const SignsTerm& term, int64_t begin, int64_t end, float* sum) {
              const float weight = signs_value(term);
              add_by_sign(term.packed + begin / 8, 0, end - begin, weight, -weight, sum);
            });
}

}  // namespace gradzip::cpu
