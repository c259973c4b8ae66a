// Powers of two as 9-bit codes. A thread takes four neighbouring elements, as the generator makes four draws.
#pragma once

#include "common/natural.h"
#include "common/parts.h"
#include "common/philox.h"
#include "cuda/block/bit_stream.cuh"
#include "cuda/block/quads.cuh"
#include "cuda/block/table.cuh"

namespace gradzip::cuda {

constexpr int kNaturalTile = 16 * kBlock;  // elements that a block packs at a time
constexpr int kNaturalSources = 124;  // vectors whose table fits the 4 KB of kernel arguments

// Blocks that run on a multiprocessor at a time. One of compute capability 7.5 takes 1024 threads.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kNaturalBlocks = 4;
#else
constexpr int kNaturalBlocks = 6;
#endif

// Codes go to shared memory two to a word, and from there to the stream. Unless it is null, `most`, zeros at launch, gets
// the bits of max |x| of each vector, which order as magnitudes do, with every NaN above infinity.
template <class T>
__global__ void __launch_bounds__(kBlock, kNaturalBlocks)
    natural_encode_kernel(Batch<NaturalSource, kNaturalSources> batch, const int64_t* replays, uint32_t* most) {
  const NaturalSource& source = batch.of[blockIdx.y];
  const T* x = static_cast<const T*>(source.x);
  const int64_t n = source.n;
  const uint64_t key = replay_key(source.key, replays);
  constexpr int kQuads = kNaturalTile / (4 * kBlock);
  __shared__ uint32_t words[kNaturalTile / 2];
  const CodeWidth width(2 * kNaturalBits);
  const int mine = 4 * int(threadIdx.x);
  uint32_t largest = 0;
  for (int64_t first = int64_t(blockIdx.x) * kNaturalTile; first < n; first += int64_t(gridDim.x) * kNaturalTile) {
    const int count = int(n - first < kNaturalTile ? n - first : kNaturalTile);
    float value[kQuads][4];
#pragma unroll
    for (int q = 0; q < kQuads; ++q) load4(x + first, mine + 4 * kBlock * q, count, value[q]);
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const int i = mine + 4 * kBlock * q;
      const Philox4 draw = philox(key, uint64_t(first + i) / 4);
      uint32_t code[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        code[j] = natural_code(value[q][j], draw.v[j]);
        largest = largest > magnitude(value[q][j]) ? largest : magnitude(value[q][j]);
      }
      words[i / 2] = code[0] | code[1] << kNaturalBits;
      words[i / 2 + 1] = code[2] | code[3] << kNaturalBits;
    }
    __syncthreads();
    pack_bytes(words, (count + 1) / 2, width, (count * kNaturalBits + 7) / 8, source.packed + first / 8 * kNaturalBits);
    __syncthreads();
  }
  largest = warp_max(largest);
  if (most && lane() == 0 && largest > 0) atomicMax(most + blockIdx.y, largest);
}

constexpr int kNaturalBatch = 480;  // payloads whose table fits the 4 KB of kernel arguments
static_assert(kNaturalBatch >= kMostHalfTerms, "a sum in 16-bit floats takes one launch");

struct NaturalPayloads {
  const uint8_t* of[kNaturalBatch];
};

template <class T>
__global__ void __launch_bounds__(kBlock) natural_decode_sum_kernel(NaturalPayloads payloads, int count, Parts parts,
                                                                    float weight, bool add, T* out, int32_t* failed) {
  const int64_t n = parts.length(blockIdx.y);
  const int own = int(blockIdx.y) * count;  // the first payload of this part
  out += parts.begin(blockIdx.y);
  const int64_t nbytes = (n * kNaturalBits + 7) / 8;
  bool bad = false;
  for (int64_t first = 4 * grid_thread(); first < n; first += 4 * grid_threads()) {
    const int64_t bit = first * kNaturalBits;
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if constexpr (sizeof(T) == 4)
      if (add) load4_changing(out, first, n, sum);
    for (int p = own; p < own + count; ++p) {
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const uint32_t two = read_bits(payloads.of[p], nbytes, bit + j * kNaturalBits, 2 * kNaturalBits);
        const float low = natural_value(two, 0), high = natural_value(two >> kNaturalBits, 0);
        bad |= !valid_natural(low) || !valid_natural(high);  // those past the end are 0
        sum[j] += weight * low;
        sum[j + 1] += weight * high;
      }
    }
    store4(out, first, n, sum);
  }
  if (bad) report(failed);
}

}  // namespace gradzip::cuda
