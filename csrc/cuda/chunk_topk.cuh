// The largest numbers of each chunk. A block takes a chunk; each thread keeps 16 neighbouring elements in registers.
#pragma once

#include "common/chunk_topk.h"
#include "cuda/block/quads.cuh"

namespace gradzip::cuda {

constexpr int kMine = kMostChunk / kBlock;  // elements of a thread
constexpr int kCodeWords = kMostChunk / 16;

__global__ void __launch_bounds__(kBlock) chunk_topk_kernel(const float* x, int64_t n, int64_t chunks, int64_t chunk,
                                                            int64_t k, int32_t* indices, uint32_t* records) {
  __shared__ uint64_t partial[kBlock / kLanes];
  __shared__ uint32_t codes[kCodeWords];
  const int mine = kMine * int(threadIdx.x);
  for (int64_t c = blockIdx.x; c < chunks; c += gridDim.x) {
    const int64_t first = c * chunk, end = first + chunk < n ? first + chunk : n;
    const int count = int(chunk_count(end - first, chunk, k));
    float value[kMine];
#pragma unroll
    for (int j = 0; j < kMine; j += 4) load4(x, first + mine + j, end, value + j);
    // The largest number that `count` magnitudes reach, bit by bit from the top. Elements past the end are 0, and do not
    // reach a number above 0.
    uint32_t threshold = 0;
    for (int bit = 30; bit >= 0; --bit) {
      const uint32_t tried = threshold | 1u << bit;
      uint64_t reach = 0;
#pragma unroll
      for (int j = 0; j < kMine; ++j) reach += magnitude(value[j]) >= tried;
      if (block_sum(reach, partial) >= uint64_t(count)) threshold = tried;
    }
    // Of those equal to it, the first ones are kept.
    uint64_t found = 0;  // above, and from bit 32 on equal
#pragma unroll
    for (int j = 0; j < kMine; ++j) {
      const uint32_t m = magnitude(value[j]);
      if (first + mine + j < end) found += m > threshold ? 1u : m == threshold ? uint64_t(1) << 32 : 0u;
    }
    uint64_t total;
    const uint64_t before = block_scan(found, partial, &total);
    const int wanted = count - int(uint32_t(total));  // of the equal ones
    int above = int(uint32_t(before)), equal = int(before >> 32);
    uint32_t kept = 0, largest = 0;  // kept: a bit for each of this thread's elements
    const int at = above + (equal < wanted ? equal : wanted);
#pragma unroll
    for (int j = 0; j < kMine; ++j) {
      const uint32_t m = magnitude(value[j]);
      if (first + mine + j >= end || m < threshold) continue;
      if (m > threshold || equal++ < wanted) kept |= 1u << j;
      largest = largest > m ? largest : m;  // one that is not kept is no larger than the kept ones
    }
    largest = warp_max(largest);
    __syncthreads();
    if (lane() == 0) partial[warp()] = largest;
    for (int i = int(threadIdx.x); i < kCodeWords; i += kBlock) codes[i] = 0;
    __syncthreads();
    largest = warp_max(lane() < warps() ? uint32_t(partial[lane()]) : 0u);
    const ChunkUnit unit = chunk_unit(largest);
    const bool finite = largest < kInfBits;
    uint64_t sum = 0;
#pragma unroll
    for (int j = 0; j < kMine; ++j)
      if (finite && (kept >> j & 1u)) sum += chunk_share(magnitude(value[j]), unit);
    sum = block_sum(sum, partial);
    uint64_t high = 0;  // the sum of those above the mean, and from bit 40 on their number
    int next = at;
#pragma unroll
    for (int j = 0; j < kMine; ++j) {
      if (!(kept >> j & 1u)) continue;
      indices[c * k + next] = int32_t(first + mine + j);
      if (finite) {
        const uint32_t share = chunk_share(magnitude(value[j]), unit);
        const bool is_high = above_mean(share, sum, uint64_t(count));
        if (is_high) high += share + (uint64_t(1) << 40);
        atomicOr(codes + next / 16, (uint32_t(is_high) | (float_bits(value[j]) >> 31) << 1) << (2 * (next % 16)));
      }
      ++next;
    }
    high = block_sum(high, partial);  // waits until all codes are in place, too
    uint32_t* record = records + c * chunk_words(k);
    const int words = int(chunk_words(count));
    for (int i = int(threadIdx.x); i < words; i += kBlock)
      record[i] = i > 0 ? codes[i - 1]
                        : chunk_levels(largest, sum, uint64_t(count), high & ((uint64_t(1) << 40) - 1), high >> 40);
    __syncthreads();  // `codes` is used again
  }
}

// A thread decodes a value. Chunks whose levels are not those of finite numbers become NaN.
__global__ void __launch_bounds__(kBlock)
    chunk_topk_values_kernel(const uint32_t* records, int64_t k, int64_t numel, float* values, int32_t* failed) {
  const int64_t words = chunk_words(k);
  for (int64_t i = grid_thread(); i < numel; i += grid_threads()) {
    const int64_t c = i / k;
    const int inside = int(i - c * k);
    const uint32_t* record = records + c * words;
    const uint32_t levels = __ldg(record), code = __ldg(record + 1 + inside / 16) >> (2 * (inside % 16));
    const bool valid = valid_levels(levels);
    if (!valid) report(failed);
    values[i] = valid ? chunk_value(code, levels) : undecodable();
  }
}

}  // namespace gradzip::cuda
