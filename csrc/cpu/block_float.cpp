#include "common/block_float.h"

#include <algorithm>
#include <cstring>

#include "cpu/half.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/philox.h"
#include "cpu/simd.h"

namespace gradzip::cpu {
namespace {

constexpr int64_t kLargestBlock = 4096;  // gradzip/ops/block_float.py checks it

// Elements for which draws are made at a time, about: enough for all lanes of the generator.
constexpr int64_t kDrawn = 1024;

// Distance at which x is fetched: making draws takes long enough for the processor to stop doing so itself.
constexpr int64_t kAhead = 2 * kDrawn;

template <class T>
void fetch(const T* x, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(x + i);
}

// The bits of the largest |x|, which order as magnitudes do, with every NaN above infinity.
GZ_INLINE uint32_t largest_body(const float* x, int n) {
  uint32_t most = 0;
  for (int i = 0; i < n; ++i) most = std::max(most, float_bits(x[i]) & 0x7fffffffu);
  return most;
}
GZ_SIMD_DISPATCH(uint32_t, largest, (const float* x, int n), (x, n))

// The same of x + residual, which is written to `sum`. sum may be x.
GZ_INLINE uint32_t largest_sum_body(const float* x, const float* residual, int n, float* sum) {
  uint32_t most = 0;
  for (int i = 0; i < n; ++i) {
    const float value = x[i] + residual[i];
    sum[i] = value;
    most = std::max(most, float_bits(value) & 0x7fffffffu);
  }
  return most;
}
GZ_SIMD_DISPATCH(uint32_t, largest_sum, (const float* x, const float* residual, int n, float* sum),
                 (x, residual, n, sum))

// error[i] = x[i] - the value of its code; error may be x, or null. draws: null rounds to nearest.
template <bool kError, class Round>
GZ_INLINE void codes_loop(const float* x, int n, float offset, float step, float* error, int8_t* codes, Round round) {
  for (int i = 0; i < n; ++i) {
    const int32_t code = round(i);
    codes[i] = int8_t(code);
    if (kError) error[i] = x[i] - block_float_value(code, offset, step);
  }
}
GZ_INLINE void codes_body(const float* x, int n, int bits, BlockScale scale, const uint16_t* draws, float* error,
                          int8_t* codes) {
  const float offset = block_float_offset(bits);
  const auto half_step = [&](int i) { return half_step_code(x[i], scale.inverse, i % 2 != 0); };
  const auto nearest = [&](int i) { return nearest_code(x[i], scale.inverse); };
  const auto stochastic = [&](int i) { return stochastic_code(x[i], scale.inverse, draws[i]); };
  if (bits == 2 && error)
    codes_loop<true>(x, n, offset, scale.step, error, codes, half_step);
  else if (bits == 2)
    codes_loop<false>(x, n, offset, scale.step, error, codes, half_step);
  else if (draws && error)
    codes_loop<true>(x, n, offset, scale.step, error, codes, stochastic);
  else if (draws)
    codes_loop<false>(x, n, offset, scale.step, error, codes, stochastic);
  else if (error)
    codes_loop<true>(x, n, offset, scale.step, error, codes, nearest);
  else
    codes_loop<false>(x, n, offset, scale.step, error, codes, nearest);
}
GZ_SIMD_DISPATCH(void, codes,
                 (const float* x, int n, int bits, BlockScale scale, const uint16_t* draws, float* error,
                  int8_t* codes),
                 (x, n, bits, scale, draws, error, codes))

// Two codes to a byte, and back. n is even.
GZ_INLINE void pack_nibbles_body(const int8_t* codes, int n, uint8_t* packed) {
  for (int i = 0; i < n / 2; ++i) {
    uint16_t pair;
    std::memcpy(&pair, codes + 2 * i, 2);
    packed[i] = uint8_t((pair & 0x0fu) | (pair >> 4 & 0xf0u));
  }
}
GZ_SIMD_DISPATCH(void, pack_nibbles, (const int8_t* codes, int n, uint8_t* packed), (codes, n, packed))

GZ_INLINE void unpack_nibbles_body(const uint8_t* packed, int n, int8_t* codes) {
  for (int i = 0; i < n / 2; ++i) {
    // Subtracting 8 from each byte borrows from the next one unless its top bit is set, which is cleared again.
    const uint16_t pair = uint16_t(((packed[i] & 0x0fu) | (packed[i] & 0xf0u) << 4) ^ 0x0808u);
    const uint16_t code = uint16_t(((pair | 0x8080u) - 0x0808u) ^ 0x8080u);
    std::memcpy(codes + 2 * i, &code, 2);
  }
}
GZ_SIMD_DISPATCH(void, unpack_nibbles, (const uint8_t* packed, int n, int8_t* codes), (packed, n, codes))

// Four codes to a byte, and back. n is a multiple of 4.
GZ_INLINE void pack_pairs_body(const int8_t* codes, int n, uint8_t* packed) {
  for (int i = 0; i < n / 4; ++i) {
    uint32_t four;
    std::memcpy(&four, codes + 4 * i, 4);
    four &= 0x03030303u;
    packed[i] = uint8_t(four | four >> 6 | four >> 12 | four >> 18);
  }
}
GZ_SIMD_DISPATCH(void, pack_pairs, (const int8_t* codes, int n, uint8_t* packed), (codes, n, packed))

GZ_INLINE void unpack_pairs_body(const uint8_t* packed, int n, int8_t* codes) {
  for (int i = 0; i < n / 4; ++i) {
    const uint32_t byte = packed[i];
    // Adding 2 modulo 4 orders the codes from -2 on; subtracting 2 from each byte borrows from none whose top bit is set.
    const uint32_t four = ((byte | byte << 6 | byte << 12 | byte << 18) & 0x03030303u) ^ 0x02020202u;
    const uint32_t code = ((four | 0x80808080u) - 0x02020202u) ^ 0x80808080u;
    std::memcpy(codes + 4 * i, &code, 4);
  }
}
GZ_SIMD_DISPATCH(void, unpack_pairs, (const uint8_t* packed, int n, int8_t* codes), (packed, n, codes))

GZ_INLINE void values_body(const int8_t* codes, int n, float offset, float step, const float* start, float* out) {
  if (start)
    for (int i = 0; i < n; ++i) out[i] = start[i] + block_float_value(codes[i], offset, step);
  else
    for (int i = 0; i < n; ++i) out[i] = block_float_value(codes[i], offset, step);
}
GZ_SIMD_DISPATCH(void, values, (const int8_t* codes, int n, float offset, float step, const float* start, float* out),
                 (codes, n, offset, step, start, out))

template <class T>
void encode(const T* x, const float* residual, int64_t rows, int64_t n, int64_t blocks, int bits, int64_t block,
            const uint64_t* keys, const int64_t* replays, float* error, uint8_t* payloads, int threads) {
  const int64_t together = std::max<int64_t>(1, kDrawn / block), record = block_float_nbytes(bits, block);
  const int64_t chunk = std::max<int64_t>(1, kChunk / (together * block)) * together;
  const auto chunks = [&](int64_t) { return ceil_div(blocks, chunk); };
  parallel_table(rows, threads, chunks, [&](int64_t row, int64_t task) {
    const int64_t begin = task * chunk, end = std::min(blocks, begin + chunk);
    const T* const own = x + row * n;
    const float* const own_residual = residual ? residual + row * n : nullptr;
    const uint64_t key = keys ? replay_key(keys[row], replays) : 0;
    uint32_t words[std::max(kLargestBlock, kDrawn) / 2];
    int8_t narrow[kLargestBlock];
    float buffer[kLargestBlock];
    for (int64_t b = begin; b < end; ++b) {
      const int64_t first = b * block;
      const int count = int(std::clamp<int64_t>(n - first, 0, block));
      if ((b - begin) % together == 0 && count > 0) {
        const int64_t ahead = std::min(n, first + kAhead), stop = std::min(n, ahead + together * block);
        fetch(own, ahead, stop);
        if (residual) fetch(own_residual, ahead, stop);
        if (keys) philox_words(key, uint64_t(first) / 2, int(std::min(together, end - b) * block / 2), words);
      }
      const float* from = as_floats(own + first, count, buffer);
      float* left = error ? error + row * n + first : nullptr;
      uint32_t most;
      if (residual) {
        most = largest_sum(from, own_residual + first, count, left);
        from = left;
      } else {
        most = largest(from, count);
      }
      const BlockScale scale = block_scale(most, bits, keys != nullptr);
      uint8_t* to = payloads + (row * blocks + b) * record;
      std::memcpy(to, &scale.step, 4);
      to += 4;
      int8_t* into = bits == 8 ? reinterpret_cast<int8_t*>(to) : narrow;
      const auto* draws = reinterpret_cast<const uint16_t*>(words) + (b - begin) % together * block;
      if (scale.finite)
        codes(from, count, bits, scale, keys ? draws : nullptr, left, into);
      else if (error)
        std::fill_n(left, count, scale.step);
      const int filled = scale.finite ? count : 0;
      std::memset(into + filled, 0, size_t(block - filled));
      if (bits == 4) pack_nibbles(narrow, int(block), to);
      if (bits == 2) pack_pairs(narrow, int(block), to);
    }
  });
}

template <class T>
void decode(const uint8_t* const* payloads, int64_t shards, int64_t each, int64_t blocks, int64_t n, int bits,
            int64_t block, float weight, const float* start, T* out, int threads) {
  const int64_t record = block_float_nbytes(bits, block);
  parallel_chunks(shards * blocks, std::max<int64_t>(1, kChunk / block), threads,
                  [&](int64_t, int64_t begin, int64_t end) {
                    int8_t narrow[kLargestBlock];
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
                        coded += 4;
                        if (bits == 4) unpack_nibbles(coded, int(block), narrow);
                        if (bits == 2) unpack_pairs(coded, int(block), narrow);
                        values(bits == 8 ? reinterpret_cast<const int8_t*>(coded) : narrow, count,
                               block_float_offset(bits), weight * step, from, sum);
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
