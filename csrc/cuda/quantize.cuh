// QSGD levels: norms, draws and packing in one read of x if buckets fit a tile.
#pragma once

#include "common/parts.h"
#include "cuda/block/bit_stream.cuh"
#include "cuda/block/quantize_tile.cuh"
#include "cuda/block/table.cuh"

namespace gradzip::cuda {

template <bool kNorms>
__global__ void __launch_bounds__(kBlock, 4) quantize_kernel(Quantizer<float> q, int tile_size, int32_t* codes) {
  alignas(16) __shared__ float tile[kNorms ? kMostTile : 4];
  for (int64_t first = int64_t(blockIdx.x) * tile_size; first < q.n; first += int64_t(gridDim.x) * tile_size) {
    const int count = int(q.n - first < tile_size ? q.n - first : tile_size);
    quantize_tile<kNorms>(q, first, count, tile, [&](int i, const float* value, const int32_t* level) {
      int32_t code[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) code[k] = float_bits(value[k]) >> 31 ? -level[k] : level[k];
      store4(codes + first, i, count, code);
    });
    if (kNorms) __syncthreads();
  }
}

constexpr int kQuantizeBatch = 99;  // vectors whose table fits the 4 KB of kernel arguments

// Codes go to shared memory four (bits <= 8) or two to a word, and from there to the stream. Unless it is null, `most`,
// zeros at launch, gets the bits of max |x| of each vector, which order as magnitudes do, with every NaN above infinity.
template <class T, bool kNorms>
__global__ void __launch_bounds__(kBlock, 4)
    quantize_packed_kernel(Batch<QuantizeSource, kQuantizeBatch> batch, int bits, int64_t bucket, Norm norm,
                           const int64_t* replays, int tile_size, uint32_t* most) {
  const QuantizeSource& source = batch.of[blockIdx.y];
  const T* const x = static_cast<const T*>(source.x);
  const Quantizer<T> q{x, source.n, bucket, bits, norm, replay_key(source.key, replays), source.norms};
  alignas(16) __shared__ float tile[kMostTile];
  uint32_t* words = reinterpret_cast<uint32_t*>(tile);
  const int together = bits <= 8 ? 4 : 2;
  uint32_t largest = 0;
  for (int64_t first = int64_t(blockIdx.x) * tile_size; first < q.n; first += int64_t(gridDim.x) * tile_size) {
    const int count = int(q.n - first < tile_size ? q.n - first : tile_size);
    quantize_tile<kNorms>(q, first, count, tile, [&](int i, const float* value, const int32_t* level) {
      uint32_t code[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        code[k] = level_code(level[k], float_bits(value[k]) >> 31, bits);
        largest = largest > magnitude(value[k]) ? largest : magnitude(value[k]);
      }
      const uint32_t low = code[0] | code[1] << bits, high = code[2] | code[3] << bits;
      if (together == 4) {
        words[i / 4] = low | high << (2 * bits);
      } else {
        words[i / 2] = low;
        words[i / 2 + 1] = high;
      }
    });
    __syncthreads();
    pack_bytes(words, (count + together - 1) / together, CodeWidth(together * bits), (count * bits + 7) / 8,
               source.packed + first / 8 * bits);
    __syncthreads();
  }
  largest = warp_max(largest);
  if (most && lane() == 0 && largest > 0) atomicMax(most + blockIdx.y, largest);
}

__global__ void __launch_bounds__(kBlock) quantize_decode_kernel(const int32_t* codes, const float* norms, int64_t n,
                                                                 int bits, int64_t bucket, float* x, int32_t* failed) {
  const int32_t s = top_level(bits);
  bool bad = false;
  for (int64_t first = int64_t(blockIdx.x) * kMostTile; first < n; first += int64_t(gridDim.x) * kMostTile) {
    const int count = int(n - first < kMostTile ? n - first : kMostTile);
    const TileBuckets buckets(first, bucket);
    for (int i = int(threadIdx.x); i < count; i += kBlock) {
      const int32_t level = __ldg(codes + first + i);
      bad |= level > s || level < -s;
      x[first + i] = level_value(level, s, __ldg(norms + buckets.first + buckets.index(i)));
    }
  }
  if (bad) report(failed);
}

constexpr int kTermsBatch = 240;  // terms whose table fits the 4 KB of kernel arguments
static_assert(kTermsBatch >= kMostHalfTerms, "a sum in 16-bit floats takes one launch");

struct QuantizedTerms {
  QuantizedTerm of[kTermsBatch];
};

template <class T>
__global__ void __launch_bounds__(kBlock)
    quantize_decode_sum_kernel(QuantizedTerms terms, int count, Parts parts, int bits, int64_t bucket, float weight,
                               bool add, T* out, int32_t* failed) {
  const int64_t n = parts.length(blockIdx.y);
  const int own = int(blockIdx.y) * count;  // the first term of this part
  out += parts.begin(blockIdx.y);
  const int32_t s = top_level(bits);
  const int64_t nbytes = (n * bits + 7) / 8;
  const uint32_t mask = (1u << bits) - 1;
  bool bad = false;
  for (int64_t first = int64_t(blockIdx.x) * kMostTile; first < n; first += int64_t(gridDim.x) * kMostTile) {
    const int left = int(n - first < kMostTile ? n - first : kMostTile);
    const TileBuckets buckets(first, bucket);
    for (int i = 4 * int(threadIdx.x); i < left; i += 4 * kBlock) {
      const int64_t bit = (first + i) * bits;
      float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      if constexpr (sizeof(T) == 4)
        if (add) load4_changing(out + first, i, left, sum);
      for (int t = own; t < own + count; ++t) {
        const uint8_t* packed = terms.of[t].packed;
        uint32_t low, high;  // two codes each
        if (bits <= 8) {
          low = read_bits(packed, nbytes, bit, 4 * bits);
          high = low >> (2 * bits);
        } else {
          low = read_bits(packed, nbytes, bit, 2 * bits);
          high = read_bits(packed, nbytes, bit + 2 * bits, 2 * bits);
        }
        const uint32_t code[4] = {low & mask, low >> bits & mask, high & mask, high >> bits & mask};
        float norm = 0.0f;
        buckets.for_four(i, left, [&](int k, int64_t b, bool another) {
          if (another) norm = __ldg(terms.of[t].norms + b);
          const bool valid = valid_norm(norm);
          bad |= !valid;
          sum[k] += valid ? weight * level_value(code_level(code[k], bits), s, norm) : undecodable();
        });
      }
      store4(out + first, i, left, sum);
    }
  }
  if (bad) report(failed);
}

}  // namespace gradzip::cuda
