// Ternary gradients, five trits to a byte. A thread packs four neighbouring bytes, from four neighbouring elements in
// each of the five planes of a block.
#pragma once

#include "common/philox.h"
#include "common/ternary.h"
#include "cuda/quads.cuh"

namespace gradzip::cuda {

constexpr int kTritThreads = kTritWidth / 4;  // per block

// This thread's four bytes of a whole block begin at byte `at` of the stream, their elements of plane k at
// element + k * kTritWidth.
struct TritQuad {
  int64_t at, element;
  GZ_DEVICE explicit TritQuad(int64_t task)
      : at(4 * task), element(task / kTritThreads * kTritBlock + task % kTritThreads * 4) {}
};

// f(byte, first element, elements between digits, digits) for the bytes of the last block, if it is not whole; by the
// first threads of the grid.
template <class F>
GZ_DEVICE void for_last_bytes(int64_t n, F f) {
  const int64_t begin = n / kTritBlock * kTritBlock;
  const int count = int(n - begin), width = (count + kDigits - 1) / kDigits;
  for (int64_t j = grid_thread(); j < width; j += grid_threads())
    f(begin / kDigits + j, begin + j, width, int((count - j + width - 1) / width));
}

__global__ void __launch_bounds__(kBlock) ternary_packed_kernel(const float* x, int64_t n, const float* scale,
                                                                const float* clip, uint64_t key, uint8_t* packed) {
  const LevelScale level = level_scale(*scale, 1);
  const float most = clip ? *clip : bits_float(kInfBits);
  for (int64_t task = grid_thread(); task < n / kTritBlock * kTritThreads; task += grid_threads()) {
    const TritQuad quad(task);
    float value[kDigits][4];
#pragma unroll
    for (int k = 0; k < kDigits; ++k) load4(x, quad.element + k * kTritWidth, n, value[k]);
    uint32_t bytes = 0;  // without carry between bytes
#pragma unroll
    for (int k = kDigits - 1; k >= 0; --k) {
      const Philox4 draw = philox(key, uint64_t(quad.element + k * kTritWidth) / 4);
      uint32_t trits = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) trits |= draw_trit(value[k][j], level, most, draw.v[j]) << (8 * j);
      bytes = 3 * bytes + trits;
    }
    if (reinterpret_cast<uintptr_t>(packed) % 4 == 0) {
      *reinterpret_cast<uint32_t*>(packed + quad.at) = bytes;
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) packed[quad.at + j] = uint8_t(bytes >> (8 * j));
    }
  }
  for_last_bytes(n, [&](int64_t at, int64_t element, int width, int digits) {
    uint32_t byte = 0;
    for (int k = digits - 1; k >= 0; --k) {
      const int64_t i = element + k * width;
      const Philox4 draw = philox(key, uint64_t(i) / 4);
      const uint32_t low = i & 1 ? draw.v[1] : draw.v[0], high = i & 1 ? draw.v[3] : draw.v[2];
      byte = 3 * byte + draw_trit(__ldg(x + i), level, most, i & 2 ? high : low);
    }
    packed[at] = uint8_t(byte);
  });
}

// Takes the lowest digit of *byte and returns its value; the others move down.
GZ_DEVICE float take_trit(uint32_t* byte, float value) {
  const uint32_t left = third(*byte);
  const int32_t trit = int32_t(*byte - 3 * left);
  *byte = left;
  return value * float((trit & 1) - (trit >> 1));
}

__global__ void __launch_bounds__(kBlock)
    ternary_decode_add_kernel(const uint8_t* packed, int64_t n, const float* scale, double weight, float* out,
                              int32_t* failed) {
  const float factor = scale ? *scale : 1.0f, value = float(weight * double(factor));
  const bool valid = valid_norm(factor);
  bool bad = !valid;
  for (int64_t task = grid_thread(); task < n / kTritBlock * kTritThreads; task += grid_threads()) {
    const TritQuad quad(task);
    uint32_t byte[4];
    float values[4];
    if (reinterpret_cast<uintptr_t>(packed) % 4 == 0) {
      const uint32_t bytes = __ldg(reinterpret_cast<const uint32_t*>(packed + quad.at));
#pragma unroll
      for (int j = 0; j < 4; ++j) byte[j] = bytes >> (8 * j) & 0xff;
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) byte[j] = __ldg(packed + quad.at + j);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const bool trits = valid && byte[j] <= kTopByte;
      bad |= !trits;
      values[j] = trits ? value : undecodable();
    }
#pragma unroll
    for (int k = 0; k < kDigits; ++k) {
      float sum[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[j] = take_trit(byte + j, values[j]);
      add4(out, quad.element + k * kTritWidth, n, sum);
    }
  }
  for_last_bytes(n, [&](int64_t at, int64_t element, int width, int digits) {
    uint32_t byte = packed[at];
    const bool trits = valid && byte <= kTopByte;
    bad |= !trits;
    for (int k = 0; k < digits; ++k) out[element + k * width] += take_trit(&byte, trits ? value : undecodable());
  });
  if (bad) report(failed);
}

}  // namespace gradzip::cuda
