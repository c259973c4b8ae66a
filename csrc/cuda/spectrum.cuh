// FFTRange in the frequency domain: energies to select coefficients by, and decoding of selected coefficients.
#pragma once

#include "common/spectrum.h"
#include "cuda/bit_stream.cuh"
#include "cuda/bitmap_tiles.cuh"

namespace gradzip::cuda {

// Bins of one row per block at a time, so that no thread divides by the length of a row.
constexpr int64_t kRowTile = 8 * kBlock;

__global__ void __launch_bounds__(kBlock)
    power_kernel(const float2* spectrum, int64_t rows, int64_t length, const float* amax, float* power) {
  const int64_t bins = length / 2 + 1, tiles = (bins + kRowTile - 1) / kRowTile;
  const float scale = unit_scale(*amax);
  for (int64_t tile = blockIdx.x; tile < rows * tiles; tile += gridDim.x) {
    const int64_t row = tile / tiles, first = (tile - row * tiles) * kRowTile;
#pragma unroll
    for (int j = 0; j < int(kRowTile / kBlock); ++j) {
      const int64_t bin = first + j * kBlock + int64_t(threadIdx.x), i = row * bins + bin;
      if (bin >= bins) continue;
      const float2 value = __ldg(spectrum + i);
      const float re = value.x * scale, im = value.y * scale;
      float energy = 2.0f * (re * re + im * im);
      if (bin == 0) energy *= 0.5f;
      if (bin == bins - 1 && length % 2 == 0) energy *= 0.5f;
      power[i] = energy;
    }
  }
}

__global__ void __launch_bounds__(kBlock)
    decode_add_kernel(const RangeFloat* words, const uint8_t* bitmap, const int64_t* offsets, const uint8_t* packed,
                      int64_t packed_bytes, int64_t count, float weight, float* spectrum, int64_t n, int32_t* failed) {
  if (offsets[(n + kTile - 1) / kTile] != count) {
    for (int64_t i = grid_thread(); i < 2 * n; i += grid_threads()) spectrum[i] = bits_float(0x7fc00000u);
    if (grid_thread() == 0) report(failed);
    return;
  }
  const RangeFloat format = *words;
  const int bits = format.bits;
  auto* bins = reinterpret_cast<float2*>(spectrum);
  for_each_bit<true>(
      bitmap, n, offsets,
      [&](int64_t i, bool, int64_t rank) {
        const uint32_t pair = read_bits(packed, packed_bytes, rank * 2 * bits, 2 * bits);
        float2 sum = bins[i];
        sum.x += weight * range_decode(format, pair & ((1u << bits) - 1));
        sum.y += weight * range_decode(format, pair >> bits);
        return sum;
      },
      [&](int64_t i, int64_t, float2 sum) { bins[i] = sum; });
}

}  // namespace gradzip::cuda
