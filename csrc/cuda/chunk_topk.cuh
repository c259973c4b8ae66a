// The largest numbers of each chunk. A block takes a chunk; each thread keeps 16 neighbouring elements in registers. Only
// candidates are compared with each other: elements that reach a lower bound of the smallest number to keep. Where they are
// too many, as with many equal numbers, that number is searched for bit by bit in all elements.
#pragma once

#include "common/chunk_topk.h"
#include "cuda/block/quads.cuh"
#include "cuda/block/table.cuh"

namespace gradzip::cuda {

constexpr int kMine = kMostChunk / kBlock;  // elements of a thread
constexpr int kCodeWords = kMostChunk / 16;
constexpr int kMostCandidates = kBlock;
static_assert(kCodeWords == kBlock, "each thread clears one");

// This thread's elements of a chunk of n elements; 0 past its end.
template <class T>
GZ_DEVICE void load_mine(const T* chunk, int n, float* value) {
#pragma unroll
  for (int j = 0; j < kMine; j += 4) load4(chunk, kMine * int(threadIdx.x) + j, n, value + j);
}
GZ_DEVICE void load_mine(const float* chunk, int n, float* value) {
  const int left = n - kMine * int(threadIdx.x);
  const float* at = chunk + kMine * threadIdx.x;
  if (left >= kMine && aligned4(chunk)) {
#pragma unroll
    for (int j = 0; j < kMine; j += 4) {
      const float4 v = __ldg(reinterpret_cast<const float4*>(at + j));
      value[j] = v.x, value[j + 1] = v.y, value[j + 2] = v.z, value[j + 3] = v.w;
    }
  } else {
#pragma unroll
    for (int j = 0; j < kMine; ++j) value[j] = j < left ? __ldg(at + j) : 0.0f;
  }
}

// The largest number with 15 leading bits that `count` of the block's numbers reach.
GZ_DEVICE uint32_t lower_bound(uint32_t mine, int count) {
  uint32_t bound = 0;
#pragma unroll
  for (int bit = 30; bit > 15; --bit) {
    const uint32_t tried = bound | 1u << bit;
    if (__syncthreads_count(mine >= tried) >= count) bound = tried;
  }
  return bound;
}

// Bit j tells whether this thread's element j reaches a limit <= 2^31.
GZ_DEVICE uint32_t reaching(const float* value, uint32_t limit) {
  uint32_t below = 0;
#pragma unroll
  for (int j = kMine - 1; j >= 0; --j) below = below << 1 | (magnitude(value[j]) - limit) >> 31;
  return below ^ ((1u << kMine) - 1);
}

// The largest number that `count` of the block's magnitudes reach, bit by bit from the top.
GZ_DEVICE uint32_t find_threshold(const float* value, uint32_t count, uint32_t* partial) {
  uint32_t threshold = 0;
#pragma unroll 1
  for (int bit = 30; bit >= 0; --bit) {
    const uint32_t tried = threshold | 1u << bit;
    if (block_sum(uint32_t(__popc(reaching(value, tried))), partial) >= count) threshold = tried;
  }
  return threshold;
}

// f(j) for each bit that is set.
template <class F>
GZ_DEVICE void for_each_set(uint32_t bits, F f) {
#pragma unroll 1
  for (; bits; bits &= bits - 1) f(__ffs(int(bits)) - 1);
}

constexpr int kChunkSources = 99, kChunkRecords = 124;  // vectors whose table fits the 4 KB of kernel arguments

// Unless it is null, `most` is zeros at launch.
template <class T>
__global__ void __launch_bounds__(kBlock)
    chunk_topk_kernel(Batch<ChunkSource, kChunkSources> batch, int64_t chunk, uint32_t* most) {
  __shared__ uint64_t sums[kBlock / kLanes];
  __shared__ uint32_t partial[kBlock / kLanes], codes[kCodeWords], largest, listed, reached;
  alignas(16) __shared__ uint32_t candidates[kMostCandidates];
  const ChunkSource& source = batch.of[blockIdx.y];
  const T* x = static_cast<const T*>(source.x);
  const int64_t n = source.n, k = source.k;
  int32_t* indices = source.indices;
  uint32_t* records = reinterpret_cast<uint32_t*>(source.records);
  uint32_t largest_levels = 0;
  for (int64_t c = blockIdx.x; c * chunk < n; c += gridDim.x) {
    const int64_t first = c * chunk, left = n - first;
    const int size = int(left < chunk ? left : chunk), mine = kMine * int(threadIdx.x);
    const int count = int(chunk_count(size, chunk, k));
    float value[kMine];
    const T* own = x + first + mine;
    const uint32_t inside = size - mine >= kMine ? (1u << kMine) - 1 : size > mine ? (1u << (size - mine)) - 1 : 0u;
    load_mine(x + first, size, value);
    uint32_t top = 0;
#pragma unroll
    for (int j = 0; j < kMine; ++j) top = top > magnitude(value[j]) ? top : magnitude(value[j]);
    if (threadIdx.x == 0) largest = listed = reached = 0;
    candidates[threadIdx.x] = 0;
    codes[threadIdx.x] = 0;
    // What `count` threads reach, as many elements do, and few others.
    const uint32_t reach = reaching(value, lower_bound(top, count)) & inside;
    uint32_t to = reach ? atomicAdd(&listed, uint32_t(__popc(reach))) : 0u;
    if (to + uint32_t(__popc(reach)) <= uint32_t(kMostCandidates))
      for_each_set(reach, [&](int j) { candidates[to++] = magnitude(load1(own + j)); });
    top = warp_max(top);
    if (lane() == 0) atomicMax(&largest, top);
    __syncthreads();
    uint32_t threshold;  // the largest number that `count` magnitudes reach
    if (listed <= uint32_t(kMostCandidates)) {
      if (const uint32_t m = candidates[threadIdx.x]) {
        uint32_t below = 0;
        for (uint32_t i = 0; i < listed; ++i) below += (candidates[i] - m) >> 31;
        if (listed - below >= uint32_t(count)) atomicMax(&reached, m);
      }
      __syncthreads();
      threshold = reached;
    } else {
      threshold = find_threshold(value, uint32_t(count), partial);
    }
    // Of those equal to it, the first ones are kept.
    uint32_t kept = reaching(value, threshold + 1);  // a bit for each of this thread's elements
    uint32_t equal = reaching(value, threshold) ^ kept;  // none past the end: these come last
    uint32_t total;  // above the threshold, and from bit 16 on equal to it
    const uint32_t before = block_scan(uint32_t(__popc(kept)) | uint32_t(__popc(equal)) << 16, partial, &total);
    const int wanted = count - int(total & 0xffffu), equal_before = int(before >> 16);
    for (int i = equal_before; equal && i < wanted; ++i, equal &= equal - 1) kept |= equal & (0u - equal);
    const int at = int(before & 0xffffu) + (equal_before < wanted ? equal_before : wanted);
    const ChunkUnit unit = chunk_unit(largest);
    const bool finite = largest < kInfBits;
    uint64_t sum = 0;
    if (finite) for_each_set(kept, [&](int j) { sum += chunk_share(magnitude(load1(own + j)), unit); });
    sum = block_sum(sum, sums);
    uint64_t high = 0;  // the sum of those above the mean, and from bit 40 on their number
    int next = at;
    for_each_set(kept, [&](int j) {
      indices[c * k + next] = int32_t(first) + mine + j;
      if (finite) {
        const float v = load1(own + j);
        const uint32_t share = chunk_share(magnitude(v), unit);
        const bool is_high = above_mean(share, sum, uint64_t(count));
        if (is_high) high += share + (uint64_t(1) << 40);
        atomicOr(codes + next / 16, (uint32_t(is_high) | (float_bits(v) >> 31) << 1) << (2 * (next % 16)));
      }
      ++next;
    });
    high = block_sum(high, sums);  // waits until all codes are in place, too
    uint32_t* record = records + c * chunk_words(k);
    if (int(threadIdx.x) < int(chunk_words(k)) - 1) record[1 + threadIdx.x] = codes[threadIdx.x];
    if (threadIdx.x == 0) {
      const uint32_t levels = chunk_levels(largest, sum, uint64_t(count), high & ((uint64_t(1) << 40) - 1), high >> 40);
      record[0] = levels;
      largest_levels = largest_levels > levels ? largest_levels : levels;  // not finite: above all that are
    }
    __syncthreads();  // shared memory is used again
  }
  if (most && largest_levels > 0) atomicMax(most + blockIdx.y, largest_levels);
}

// A thread decodes a value. Chunks whose levels are not those of finite numbers become NaN.
__global__ void __launch_bounds__(kBlock)
    chunk_topk_values_kernel(Batch<ChunkRecords, kChunkRecords> batch, int64_t chunk, int32_t* failed) {
  const ChunkRecords& of = batch.of[blockIdx.y];
  const int64_t k = of.k, words = chunk_words(k), numel = chunks_count(of.n, chunk, k);
  const uint32_t* records = reinterpret_cast<const uint32_t*>(of.records);
  float* values = of.values;
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
