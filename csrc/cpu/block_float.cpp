#include "common/block_float.h"

#include <algorithm>
#include <cstring>

#include "cpu/half.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/philox.h"
#include "cpu/vectors.h"

namespace gradzip::cpu {
namespace {

constexpr int64_t kLargestBlock = 4096;  // gradzip/ops/block_float.py checks it

// Elements for which draws are made at a time, about: enough for all lanes of the generator.
constexpr int64_t kDrawn = 1024;

// Distance at which x is fetched: making draws takes long enough for the processor to stop doing so itself.
constexpr int64_t kAhead = 2 * kDrawn;

template <class T>
void fetch(const T* x, int64_t begin, int64_t end) {
#pragma GCC unroll 8
  for (int64_t i = begin; i < end; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(x + i);
}

// The bits of the largest |x|, which order as magnitudes do, with every NaN above infinity.
GZ_INLINE uint32_t largest_body(const float* x, int n) {
  uint32_t most = 0;
#pragma GCC unroll 4
  for (int i = 0; i < n; ++i) most = std::max(most, float_bits(x[i]) & 0x7fffffffu);
  return most;
}
GZ_SIMD_DISPATCH(uint32_t, largest, (const float* x, int n), (x, n))

// The same of x + residual, which is written to `sum`. sum may be x.
GZ_INLINE uint32_t largest_sum_body(const float* x, const float* residual, int n, float* sum) {
  uint32_t most = 0;
#pragma GCC unroll 4
  for (int i = 0; i < n; ++i) {
    const float value = x[i] + residual[i];
    sum[i] = value;
    most = std::max(most, float_bits(value) & 0x7fffffffu);
  }
  return most;
}
GZ_SIMD_DISPATCH(uint32_t, largest_sum, (const float* x, const float* residual, int n, float* sum),
                 (x, residual, n, sum))

constexpr int kGroup = kBytesTogether;  // elements whose codes are made together; a block has a multiple of it

// error[i] = x[i] - the value of its code; error may be x, or null.
template <int kBytes, bool kError, class Round>
GZ_INLINE void codes_loop(const float* x, int n, float offset, float step, float* error, int8_t* codes, Round round) {
  int i = 0;
  for (; i + kGroup <= n; i += kGroup) {
    int32_t wide[kGroup];
    for (int j = 0; j < kGroup; ++j) wide[j] = round(i + j);
    to_bytes<kBytes>(wide, codes + i);
    if (kError)
      for (int j = 0; j < kGroup; ++j) error[i + j] = x[i + j] - block_float_value(wide[j], offset, step);
  }
  for (; i < n; ++i) {
    const int32_t code = round(i);
    codes[i] = int8_t(code);
    if (kError) error[i] = x[i] - block_float_value(code, offset, step);
  }
}
// draws: null rounds to nearest.
template <int kBytes>
GZ_INLINE void codes_body(const float* x, int n, int bits, BlockScale scale, const uint16_t* draws, float* error,
                          int8_t* codes) {
  const float offset = block_float_offset(bits);
  const auto half_step = [&](int i) { return half_step_code(x[i], scale.inverse, i % 2 != 0); };
  const auto nearest = [&](int i) { return nearest_code(x[i], scale.inverse); };
  const auto stochastic = [&](int i) { return stochastic_code(x[i], scale.inverse, draws[i]); };
  if (bits == 2 && error)
    codes_loop<kBytes, true>(x, n, offset, scale.step, error, codes, half_step);
  else if (bits == 2)
    codes_loop<kBytes, false>(x, n, offset, scale.step, error, codes, half_step);
  else if (draws && error)
    codes_loop<kBytes, true>(x, n, offset, scale.step, error, codes, stochastic);
  else if (draws)
    codes_loop<kBytes, false>(x, n, offset, scale.step, error, codes, stochastic);
  else if (error)
    codes_loop<kBytes, true>(x, n, offset, scale.step, error, codes, nearest);
  else
    codes_loop<kBytes, false>(x, n, offset, scale.step, error, codes, nearest);
}
GZ_SIMD_DISPATCH_BYTES(void, codes,
                       (const float* x, int n, int bits, BlockScale scale, const uint16_t* draws, float* error,
                        int8_t* codes),
                       (x, n, bits, scale, draws, error, codes))

// Two codes to a byte. n is even.
GZ_INLINE void pack_nibbles_body(const int8_t* codes, int n, uint8_t* packed) {
  for (int i = 0; i < n / 2; ++i) {
    uint16_t pair;
    std::memcpy(&pair, codes + 2 * i, 2);
    packed[i] = uint8_t((pair & 0x0fu) | (pair >> 4 & 0xf0u));
  }
}
GZ_SIMD_DISPATCH(void, pack_nibbles, (const int8_t* codes, int n, uint8_t* packed), (codes, n, packed))

// Four codes to a byte. n is a multiple of 4.
GZ_INLINE void pack_pairs_body(const int8_t* codes, int n, uint8_t* packed) {
  for (int i = 0; i < n / 4; ++i) {
    uint32_t four;
    std::memcpy(&four, codes + 4 * i, 4);
    four &= 0x03030303u;
    packed[i] = uint8_t(four | four >> 6 | four >> 12 | four >> 18);
  }
}
GZ_SIMD_DISPATCH(void, pack_pairs, (const int8_t* codes, int n, uint8_t* packed), (codes, n, packed))

// The values of 8 codes, which are one word or less, and a register of AVX2: added to `start` unless that is null.
template <int kBytes, int kBits>
GZ_INLINE void eight_values(const uint8_t* coded, float step, const float* start, float* out) {
  using Ints = Vector<int32_t, 32>;
  using Floats = Vector<float, 32>;
  Ints codes;
  if constexpr (kBits == 8 && kBytes == 16) {
    for (int i = 0; i < 8; ++i) codes[i] = int8_t(coded[i]);
  } else if constexpr (kBits == 8) {
    int64_t word;
    std::memcpy(&word, coded, sizeof word);
    codes = __builtin_ia32_pmovsxbd256(Vector<char, 16>(Vector<int64_t, 16>{word, 0}));
  } else {
    int32_t word = 0;
    std::memcpy(&word, coded, kBits);
    const Ints above = 32 - kBits - kBits * Ints{0, 1, 2, 3, 4, 5, 6, 7};
    codes = (Ints{} + word) << above >> (32 - kBits);
  }
  Floats values = __builtin_convertvector(codes, Floats);
  if (kBits == 2) values += block_float_offset(kBits);
  values *= step;
  store<32>(out, start ? load<32>(start) + values : values);
}
template <int kBytes, int kBits>
GZ_INLINE void values_loop(const uint8_t* coded, int n, float step, const float* start, float* out) {
  int i = 0;
#pragma GCC unroll 4
  for (; i + 8 <= n; i += 8, coded += kBits)
    eight_values<kBytes, kBits>(coded, step, start ? start + i : nullptr, out + i);
  if (i == n) return;
  const size_t nbytes = size_t(n - i) * sizeof(float);
  float rest[8] = {}, sums[8];
  if (start) std::memcpy(rest, start + i, nbytes);
  eight_values<kBytes, kBits>(coded, step, start ? rest : nullptr, sums);
  std::memcpy(out + i, sums, nbytes);
}
template <int kBytes, int kBits>
GZ_INLINE void values_of(const uint8_t* coded, int n, float step, const float* start, float* out) {
  if (start)
    values_loop<kBytes, kBits>(coded, n, step, start, out);
  else
    values_loop<kBytes, kBits>(coded, n, step, nullptr, out);
}
template <int kBytes>
GZ_INLINE void values_body(const uint8_t* coded, int n, int bits, float step, const float* start, float* out) {
  if (bits == 8)
    values_of<kBytes, 8>(coded, n, step, start, out);
  else if (bits == 4)
    values_of<kBytes, 4>(coded, n, step, start, out);
  else
    values_of<kBytes, 2>(coded, n, step, start, out);
}
GZ_SIMD_DISPATCH_BYTES(void, values,
                       (const uint8_t* coded, int n, int bits, float step, const float* start, float* out),
                       (coded, n, bits, step, start, out))

template <class T>
void encode(const T* x, const float* residual, int64_t rows, int64_t n, int64_t blocks, int bits, int64_t block,
            const uint64_t* keys, const int64_t* replays, float* error, uint8_t* payloads, int threads) {
  const int64_t together = std::max<int64_t>(1, kDrawn / block), record = block_float_nbytes(bits, block);
  const int64_t chunk = std::max<int64_t>(1, kChunk / (together * block)) * together;
  const auto chunks = [&](int64_t) { return ceil_div(blocks, chunk); };
  parallel_table(rows, threads, chunks, [&](int64_t row, int64_t task) {
    const T* const own = x + row * n;
    const float* const own_residual = residual ? residual + row * n : nullptr;
    float* const own_error = error ? error + row * n : nullptr;
    const uint64_t key = keys ? replay_key(keys[row], replays) : 0;
    uint32_t words[std::max(kLargestBlock, kDrawn) / 2];
    int8_t narrow[kLargestBlock];
    float buffer[std::max(kLargestBlock, kDrawn)];
    BlockScale scales[kDrawn / kGroup];
    const int64_t last = std::min(blocks, (task + 1) * chunk);
    for (int64_t begin = task * chunk; begin < last; begin += together) {
      const int64_t end = std::min(last, begin + together), first = begin * block;
      const auto count = [&](int64_t b) { return int(std::clamp<int64_t>(n - b * block, 0, block)); };
      const int64_t ahead = std::min(n, first + kAhead), stop = std::min(n, ahead + together * block);
      fetch(own, ahead, stop);
      if (residual) fetch(own_residual, ahead, stop);
      if (keys && first < n) philox_words(key, uint64_t(first) / 2, int((end - begin) * block / 2), words);
      const int64_t length = std::clamp<int64_t>(n - first, 0, (end - begin) * block);
      const float* from = as_floats(own + first, length, buffer);
      // Steps of all blocks first: the divisions of one take place while the next one is read.
      for (int64_t b = begin, i = first; b < end; ++b, i += block)
        scales[b - begin] =
            block_scale(residual ? largest_sum(from + (i - first), own_residual + i, count(b), own_error + i)
                                 : largest(from + (i - first), count(b)),
                        bits, keys != nullptr);
      const auto* draws = reinterpret_cast<const uint16_t*>(words);
      for (int64_t b = begin, i = first; b < end; ++b, i += block, draws += block) {
        const BlockScale scale = scales[b - begin];
        const int filled = scale.finite ? count(b) : 0;
        float* left = error ? own_error + i : nullptr;
        uint8_t* to = payloads + (row * blocks + b) * record;
        std::memcpy(to, &scale.step, 4);
        to += 4;
        int8_t* into = bits == 8 ? reinterpret_cast<int8_t*>(to) : narrow;
        codes(residual ? own_error + i : from + (i - first), filled, bits, scale, keys ? draws : nullptr, left, into);
        if (error && !scale.finite) std::fill_n(left, count(b), scale.step);
        if (filled < block) std::memset(into + filled, 0, size_t(block - filled));
        if (bits == 4) pack_nibbles(narrow, int(block), to);
        if (bits == 2) pack_pairs(narrow, int(block), to);
      }
    }
  });
}

template <class T>
void decode(const uint8_t* const* payloads, int64_t shards, int64_t each, int64_t blocks, int64_t n, int bits,
            int64_t block, float weight, const float* start, T* out, int threads) {
  const int64_t record = block_float_nbytes(bits, block);
  parallel_chunks(shards * blocks, std::max<int64_t>(1, kChunk / block), threads,
                  [&](int64_t, int64_t begin, int64_t end) {
                    float buffer[kLargestBlock];
                    for (int64_t b = begin; b < end; ++b) {
                      const int64_t first = b * block, shard = b / blocks, at = (b - shard * blocks) * record;
                      const int count = int(std::clamp<int64_t>(n - first, 0, block));
                      if (count == 0) break;
                      const float* from = start ? start + first : nullptr;
                      float* const sum = room_for(out + first, buffer);
                      for (int64_t i = 0; i < each; ++i) {
                        const uint8_t* coded = payloads[shard * each + i] + at;
                        float step;
                        std::memcpy(&step, coded, 4);
                        values(coded + 4, count, bits, weight * step, from, sum);
                        from = sum;
                      }
                      write(sum, count, out + first);
                    }
                  });
}

}  // namespace

void block_float_encode(const void* x, int dtype, const float* residual, int64_t rows, int64_t n, int64_t blocks,
                        int bits, int64_t block, const uint64_t* keys, const int64_t* replays, float* error,
                        uint8_t* payloads, int threads) {
  typed(x, dtype,
        [&](auto* of) { encode(of, residual, rows, n, blocks, bits, block, keys, replays, error, payloads, threads); });
}

void block_float_decode(const uint8_t* const* payloads, int64_t shards, int64_t each, int64_t blocks, int64_t n,
                        int bits, int64_t block, float weight, const float* start, void* out, int dtype, int threads) {
  typed(out, dtype,
        [&](auto* to) { decode(payloads, shards, each, blocks, n, bits, block, weight, start, to, threads); });
}

}  // namespace gradzip::cpu
