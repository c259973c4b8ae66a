// Block-scaled integers. A thread takes eight elements, as many as a counter of the generator has draws for: their codes
// are two words of a payload, one, or a half. A payload is read and written as words; its address is a multiple of 4.
#pragma once

#include "common/block_float.h"
#include "common/philox.h"
#include "cuda/block/quads.cuh"

namespace gradzip::cuda {

constexpr int kEight = 8;

// value[j] = x[first + j] + residual[first + j], 0 from n on. residual may be null. x may be written to later on if it
// is float32.
template <class T>
GZ_DEVICE void load_sums(const T* x, const float* residual, int64_t first, int64_t n, float* value) {
#pragma unroll
  for (int q = 0; q < kEight; q += 4) {
    if constexpr (sizeof(T) == 4)
      load4_changing(x, first + q, n, value + q);
    else
      load4(x, first + q, n, value + q);
    if (residual == nullptr) continue;
    float more[4];
    load4(residual, first + q, n, more);
#pragma unroll
    for (int j = 0; j < 4; ++j) value[q + j] += more[j];
  }
}

// out[first + j] = value[j], below n.
template <class T>
GZ_DEVICE void store_eight(T* out, int64_t first, int64_t n, const float* value) {
  store4(out, first, n, value);
  store4(out, first + 4, n, value + 4);
}

// Keys of the rows that a launch takes, one for each blockIdx.y: an argument of the launch.
constexpr int kKeysBatch = 256;
struct Keys {
  uint64_t of[kKeysBatch];
};

// A warp encodes a block. kOnce: a block is at most 256 elements, so that each lane keeps its own between the search of
// the largest magnitude and the rounding. A row for each blockIdx.y. error may be x: a thread reads what it writes before
// it does.
template <class T, bool kOnce>
__global__ void __launch_bounds__(kBlock)
    block_float_encode_kernel(const T* x, const float* residual, int64_t n, int64_t blocks, int bits, int block,
                              bool stochastic, Keys keys, const int64_t* replays, float* error, uint32_t* payloads) {
  const int64_t record = block_float_nbytes(bits, block) / 4, row = blockIdx.y;
  const uint64_t key = stochastic ? replay_key(keys.of[row], replays) : 0;
  x += row * n;
  if (residual) residual += row * n;
  if (error) error += row * n;
  uint32_t* payload = payloads + row * blocks * record;
  for (int64_t b = int64_t(blockIdx.x) * warps() + warp(); b < blocks; b += int64_t(gridDim.x) * warps()) {
    const int64_t first = b * block;
    float value[kEight];
    uint32_t most = 0;
    for (int i = kEight * lane(); i < block; i += kEight * kLanes) {
      load_sums(x, residual, first + i, n, value);
#pragma unroll
      for (int j = 0; j < kEight; ++j) {
        const uint32_t m = magnitude(value[j]);
        most = most > m ? most : m;
      }
    }
    const BlockScale scale = block_scale(warp_max(most), bits, stochastic);
    uint32_t* words = payload + b * record;
    if (lane() == 0) words[0] = float_bits(scale.step);
    for (int i = kEight * lane(); i < block; i += kEight * kLanes) {
      if (!kOnce) load_sums(x, residual, first + i, n, value);
      int32_t code[kEight] = {0, 0, 0, 0, 0, 0, 0, 0};
      if (scale.finite && first + i < n) {
        if (stochastic) {
          const Philox4 draw = philox(key, uint64_t(first + i) / kEight);
#pragma unroll
          for (int j = 0; j < kEight; ++j)
            code[j] = stochastic_code(value[j], scale.inverse, draw.v[j / 2] >> (16 * (j % 2)) & 0xffffu);
        } else {
#pragma unroll
          for (int j = 0; j < kEight; ++j) {
            if (bits != 2)
              code[j] = nearest_code(value[j], scale.inverse);
            else if (first + i + j < n)  // what follows has code 0, which is not zero
              code[j] = half_step_code(value[j], scale.inverse, j % 2 != 0);
          }
        }
      }
      const uint32_t mask = (1u << bits) - 1u;
      uint32_t low = 0, high = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        low |= (uint32_t(code[j]) & mask) << (bits * j);
        high |= (uint32_t(code[j + 4]) & mask) << (bits * j);
      }
      if (bits == 8) {
        words[1 + i / 4] = low;
        words[2 + i / 4] = high;
      } else if (bits == 4) {
        words[1 + i / 8] = low | high << 16;
      } else {  // half a word
        reinterpret_cast<uint16_t*>(words + 1)[i / 8] = uint16_t(low | high << 8);
      }
      if (error == nullptr) continue;
      const float offset = block_float_offset(bits);
#pragma unroll
      for (int j = 0; j < kEight; ++j)
        value[j] = scale.finite ? value[j] - block_float_value(code[j], offset, scale.step) : scale.step;
      store_eight(error, first + i, n, value);
    }
  }
}

constexpr int kTableSize = 256;  // payloads whose table fits the 4 KB of kernel arguments
static_assert(kTableSize >= kMostHalfTerms, "a sum in 16-bit floats takes one launch");

struct PayloadTable {
  const uint32_t* of[kTableSize];
};

// `each` payloads of each shard, one shard after the other in the table. `shards * blocks * block` >= n.
template <class T>
__global__ void __launch_bounds__(kBlock)
    block_float_decode_kernel(PayloadTable payloads, int each, int64_t blocks, int64_t n, int bits, int block,
                              float weight, const float* start, T* out) {
  const int64_t record = block_float_nbytes(bits, block) / 4, shard_numel = blocks * block;
  for (int64_t first = kEight * grid_thread(); first < n; first += kEight * grid_threads()) {
    const int64_t shard = first / shard_numel, inside = first - shard * shard_numel, b = inside / block;
    const int i = int(inside - b * block);
    float sum[kEight];
    if (start) load_sums(start, nullptr, first, n, sum);
    for (int p = 0; p < each; ++p) {
      const uint32_t* words = payloads.of[shard * each + p] + b * record;
      const float step = weight * bits_float(__ldg(words));
      uint32_t low, high;  // four codes each
      if (bits == 8) {
        low = __ldg(words + 1 + i / 4);
        high = __ldg(words + 2 + i / 4);
      } else if (bits == 4) {
        low = __ldg(words + 1 + i / 8);
        high = low >> 16;
      } else {
        low = __ldg(words + 1 + i / 16) >> (16 * (i / 8 % 2));
        high = low >> 8;
      }
#pragma unroll
      for (int j = 0; j < kEight; ++j) {
        const uint32_t word = (j < 4 ? low : high) >> (bits * (j % 4));
        const int32_t code = int32_t(word << (32 - bits)) >> (32 - bits);
        const float value = block_float_value(code, block_float_offset(bits), step);
        sum[j] = start || p > 0 ? sum[j] + value : value;
      }
    }
    store_eight(out, first, n, sum);
  }
}

}  // namespace gradzip::cuda
