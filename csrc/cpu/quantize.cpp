#include "cpu/quantize.h"

#include <algorithm>
#include <atomic>
#include <numeric>

#include "common/parts.h"
#include "cpu/abs_max.h"
#include "cpu/bit_stream.h"
#include "cpu/bucket_norms.h"
#include "cpu/narrow_stream.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/philox.h"
#include "cpu/vectors.h"

namespace gradzip::cpu {
namespace {

// Parameters of one bucket.
struct Bucket {
  LevelScale scale;
  int32_t s;
  int bits;
};

GZ_INLINE int32_t level_of(float x, uint32_t random, const Bucket& b) {
  return stochastic_level(finite_magnitude(x), b.scale, b.s, random);
}
GZ_INLINE int32_t code_of(float x, uint32_t random, const Bucket& b) {
  return int32_t(level_code(level_of(x, random, b), float_bits(x) >> 31, b.bits));
}
GZ_INLINE void signed_levels_body(const float* x, const uint32_t* random, int n, Bucket b, int32_t* codes) {
  for (int i = 0; i < n; ++i) {
    const int32_t level = level_of(x[i], random[i], b);
    codes[i] = float_bits(x[i]) >> 31 ? -level : level;
  }
}
// Sign-magnitude codes of up to 8 bits, and of more.
template <int kBytes>
GZ_INLINE void narrow_codes_body(const float* x, const uint32_t* random, int n, Bucket b, uint8_t* codes) {
  int i = 0;
  for (; i + kBytesTogether <= n; i += kBytesTogether) {
    int32_t wide[kBytesTogether];
    for (int j = 0; j < kBytesTogether; ++j) wide[j] = code_of(x[i + j], random[i + j], b);
    to_bytes<kBytes>(wide, codes + i);
  }
  for (; i < n; ++i) codes[i] = uint8_t(code_of(x[i], random[i], b));
}
GZ_INLINE void wide_codes_body(const float* x, const uint32_t* random, int n, Bucket b, uint32_t* codes) {
  for (int i = 0; i < n; ++i) codes[i] = uint32_t(code_of(x[i], random[i], b));
}
GZ_SIMD_DISPATCH(void, signed_levels, (const float* x, const uint32_t* random, int n, Bucket b, int32_t* codes),
                 (x, random, n, b, codes))
GZ_SIMD_DISPATCH_BYTES(void, narrow_codes, (const float* x, const uint32_t* random, int n, Bucket b, uint8_t* codes),
                       (x, random, n, b, codes))
GZ_SIMD_DISPATCH(void, wide_codes, (const float* x, const uint32_t* random, int n, Bucket b, uint32_t* codes),
                 (x, random, n, b, codes))

// f(begin, end) over [0, n) in pieces that begin at a multiple of 8, once the norms of their buckets are known. The
// norms of short buckets are computed just before, so that x is read from memory once.
template <class T, class F>
void with_norms(const T* x, int64_t n, int64_t bucket, Norm norm, float* norms, int threads, F&& f) {
  const int64_t together = std::lcm<int64_t>(bucket, 8);
  if (bucket > kChunk || together > 4 * kChunk) {
    bucket_norms(x, dtype_of(x), n, bucket, int(norm), norms, threads);
    return parallel_chunks(n, kChunk, threads, [&](int64_t, int64_t begin, int64_t end) { f(begin, end); });
  }
  const int64_t piece = std::max<int64_t>(1, kAhead / together) * together;
  parallel_chunks(n, std::max<int64_t>(1, kChunk / piece) * piece, threads, [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += piece) {
      const int64_t stop = std::min(end, i + piece);
      bucket_norms_here(x + i, stop - i, bucket, norm, norms + i / bucket);
      f(i, stop);
    }
  });
}

template <class T>
Bucket bucket_of(const Quantizer<T>& q, int64_t b) {
  const int32_t s = top_level(q.bits);
  return {level_scale(q.norms[b], s), s, q.bits};
}

// Codes of [begin, end), at most kBitBlock elements from a multiple of 4.
template <class T, class Code, class Kernel>
GZ_INLINE void quantize_block(const Quantizer<T>& q, int64_t begin, int64_t end, Code* codes, Kernel kernel) {
  for (int64_t i = begin + kAhead; i < std::min(end + kAhead, q.n); i += 64 / int64_t(sizeof(T)))
    __builtin_prefetch(q.x + i);
  uint32_t random[kBitBlock];
  float buffer[kBitBlock];
  const float* x = as_floats(q.x + begin, end - begin, buffer);
  philox_words(q.key, uint64_t(begin), int(end - begin), random);
  by_bucket(begin, end, q.bucket, [&](int64_t from, int64_t to, int64_t b) {
    kernel(x + (from - begin), random + (from - begin), int(to - from), bucket_of(q, b), codes + (from - begin));
  });
}

template <class T>
void packed_levels(const Quantizer<T>& q, int64_t begin, int64_t end, uint8_t* out) {
  for (int64_t i = begin; i < end; i += kBitBlock) {
    const int64_t stop = std::min(end, i + kBitBlock);
    uint8_t* to = out + i / 8 * q.bits;
    if (q.bits <= 8) {
      uint8_t codes[kBitBlock];
      quantize_block(q, i, stop, codes, narrow_codes);
      pack_narrow(codes, int(stop - i), q.bits, to);
    } else {
      uint32_t codes[kBitBlock];
      quantize_block(q, i, stop, codes, wide_codes);
      pack_block(codes, int(stop - i), q.bits, to);
    }
  }
}

// out[i] += weight * value, the value rounded first: weight 1 onto zeros has the bits of quantize_decode.
template <class Code>
GZ_INLINE void add_values_loop(const Code* codes, int n, int bits, float norm, float weight, float* out) {
  const int32_t s = top_level(bits);
  for (int i = 0; i < n; ++i) out[i] += weight * level_value(code_level(uint32_t(codes[i]), bits), s, norm);
}
GZ_INLINE void add_narrow_body(const uint8_t* codes, int n, int bits, float norm, float weight, float* out) {
  add_values_loop(codes, n, bits, norm, weight, out);
}
GZ_INLINE void add_wide_body(const uint32_t* codes, int n, int bits, float norm, float weight, float* out) {
  add_values_loop(codes, n, bits, norm, weight, out);
}
GZ_SIMD_DISPATCH(void, add_narrow, (const uint8_t* codes, int n, int bits, float norm, float weight, float* out),
                 (codes, n, bits, norm, weight, out))
GZ_SIMD_DISPATCH(void, add_wide, (const uint32_t* codes, int n, int bits, float norm, float weight, float* out),
                 (codes, n, bits, norm, weight, out))

// Elements of `out` that stay in the L1 cache while all terms are added to them.
constexpr int64_t kSumBlock = 1 << 12;

// Adds the values of the levels of [begin, end) of n to those of `out`; begin is a multiple of kBitBlock.
void add_levels(const QuantizedTerm& term, int64_t n, int64_t begin, int64_t end, int bits, int64_t bucket,
                float weight, float* out) {
  const int64_t nbytes = ceil_div(n * bits, 8);
  for (int64_t i = begin; i < end; i += kBitBlock) {
    const int count = int(std::min<int64_t>(end - i, kBitBlock));
    uint8_t narrow[kBitBlock];
    uint32_t wide[kBitBlock];
    if (bits <= 8)
      unpack_narrow(term.packed + i / 8 * bits, count, bits, narrow);
    else
      for (int j = 0; j < count; ++j) wide[j] = uint32_t(read_bits(term.packed, nbytes, (i + j) * bits, bits));
    by_bucket(i, i + count, bucket, [&](int64_t from, int64_t to, int64_t b) {
      if (bits <= 8)
        add_narrow(narrow + (from - i), int(to - from), bits, term.norms[b], weight, out + (from - begin));
      else
        add_wide(wide + (from - i), int(to - from), bits, term.norms[b], weight, out + (from - begin));
    });
  }
}

// Returns whether all levels are in -s..s.
GZ_INLINE bool level_values_body(const int32_t* codes, int n, int32_t s, float norm, float* x) {
  int32_t beyond = 0;
  for (int i = 0; i < n; ++i) {
    beyond |= int32_t(codes[i] > s) | int32_t(codes[i] < -s);
    x[i] = level_value(codes[i], s, norm);
  }
  return beyond == 0;
}
GZ_SIMD_DISPATCH(bool, level_values, (const int32_t* codes, int n, int32_t s, float norm, float* x),
                 (codes, n, s, norm, x))

template <class T>
void pack(const T* x, const QuantizeSource& of, int bits, int64_t bucket, Norm norm, const int64_t* replays,
          float* most, int threads) {
  const Quantizer<T> quantizer{x, of.n, of.norms, bucket, bits, replay_key(of.key, replays)};
  std::atomic<int64_t> largest{0};
  with_norms(x, of.n, bucket, norm, of.norms, threads, [&](int64_t begin, int64_t end) {
    if (most) raise(&largest, int64_t(abs_max_here(x + begin, end - begin)));
    packed_levels(quantizer, begin, end, of.packed);
  });
  if (most) *most = bits_float(uint32_t(largest));
}

template <class T>
void decode_sum(const QuantizedTerm* terms, int64_t count, int64_t n, int bits, int64_t bucket, float weight, bool add,
                T* out, int threads) {
  parallel_chunks(n, kChunk, threads, [&](int64_t, int64_t begin, int64_t end) {
    float buffer[kSumBlock];
    for (int64_t i = begin; i < end; i += kSumBlock) {
      const int64_t stop = std::min(end, i + kSumBlock);
      float* const sum = room_for(out + i, buffer);
      if (!add) std::fill_n(sum, stop - i, 0.0f);
      for (int64_t t = 0; t < count; ++t) add_levels(terms[t], n, i, stop, bits, bucket, weight, sum);
      write(sum, stop - i, out + i);
    }
  });
}

}  // namespace

void quantize_levels(const Quantizer<float>& q, int64_t begin, int64_t end, int32_t* levels) {
  for (int64_t i = begin; i < end; i += kBitBlock)
    quantize_block(q, i, std::min(end, i + kBitBlock), levels + (i - begin), signed_levels);
}

void quantize(const float* x, int64_t n, int bits, int64_t bucket, int norm, uint64_t key, int32_t* codes, float* norms,
              int threads) {
  const Quantizer<float> quantizer{x, n, norms, bucket, bits, key};
  with_norms(x, n, bucket, Norm(norm), norms, threads,
             [&](int64_t begin, int64_t end) { quantize_levels(quantizer, begin, end, codes + begin); });
}

void quantize_packed(const QuantizeSource* table, int64_t count, int dtype, int bits, int64_t bucket, int norm,
                     const int64_t* replays, float* most, int threads) {
  const auto size = [&](int64_t i) { return table[i].n; };
  parallel_pieces(count, threads, size, [&](int64_t i, int threads_of_one) {
    float* const own = most ? most + i : nullptr;
    typed(table[i].x, dtype,
          [&](auto* x) { pack(x, table[i], bits, bucket, Norm(norm), replays, own, threads_of_one); });
  });
}

void quantize_decode(const int32_t* codes, const float* norms, int64_t n, int bits, int64_t bucket, float* x,
                     int32_t* failed, int threads) {
  const int32_t s = top_level(bits);
  std::atomic<bool> valid{true};
  parallel_chunks(n, kChunk, threads, [&](int64_t, int64_t begin, int64_t end) {
    by_bucket(begin, end, bucket, [&](int64_t from, int64_t to, int64_t b) {
      if (!level_values(codes + from, int(to - from), s, norms[b], x + from)) valid = false;
    });
  });
  if (!valid) *failed = 1;
}

void quantize_decode_sum(const QuantizedTerm* terms, int64_t count, int64_t parts, int64_t n, int bits, int64_t bucket,
                         float weight, bool add, void* out, int dtype, int32_t* failed, int threads) {
  const Parts of = parts_of(n, parts);
  for (int64_t t = 0; t < count * parts; ++t)
    if (!all_norms(terms[t].norms, ceil_div(of.length(t / count), bucket))) {
      *failed = int32_t(t) + 1;
      return;
    }
  typed(out, dtype, [&](auto* to) {
    for (int64_t p = 0; p < parts; ++p)
      decode_sum(terms + p * count, count, of.length(p), bits, bucket, weight, add, to + of.begin(p), threads);
  });
}

}  // namespace gradzip::cpu
