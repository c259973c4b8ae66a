// Building blocks of kernels: reductions and scans over warps and blocks, wide loads, the last block of a grid.
//
// Every kernel is correct with any grid, with blocks run one at a time in any order: none waits for another block, so
// the same source runs under tests/simt/simt.h. Blocks have whole warps; all lanes take part in all warp collectives.
#pragma once

#include "common/macros.h"
#include "common/range_float.h"

#define GZ_DEVICE __device__ __forceinline__

namespace gradzip::cuda {

constexpr int kLanes = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kBlock = 256;  // threads per block, unless a kernel says otherwise

GZ_DEVICE int lane() { return int(threadIdx.x) % kLanes; }
GZ_DEVICE int warp() { return int(threadIdx.x) / kLanes; }
GZ_DEVICE int warps() { return int(blockDim.x) / kLanes; }
GZ_DEVICE int64_t grid_thread() { return int64_t(blockIdx.x) * blockDim.x + threadIdx.x; }
GZ_DEVICE int64_t grid_threads() { return int64_t(gridDim.x) * blockDim.x; }

// CUDA's atomics take its own 64-bit type.
GZ_DEVICE void atomic_add(uint64_t* address, uint64_t value) {
  atomicAdd(reinterpret_cast<unsigned long long*>(address), static_cast<unsigned long long>(value));
}
GZ_DEVICE void atomic_add(int64_t* address, int64_t value) {
  atomic_add(reinterpret_cast<uint64_t*>(address), uint64_t(value));
}

// Sets a kernel's flag, which may be null. Atomic: other threads may set it at the same time.
template <class T>
GZ_DEVICE void report(T* flag) {
  if (flag) atomicExch(flag, T(1));
}

GZ_DEVICE uint32_t magnitude(float x) { return float_bits(x) & 0x7fffffffu; }

// --- over a warp
template <class T>
GZ_DEVICE T warp_sum(T value) {
#pragma unroll
  for (int d = kLanes / 2; d > 0; d /= 2) value += __shfl_xor_sync(kAllLanes, value, d);
  return value;
}

template <class T>
GZ_DEVICE T warp_max(T value) {
#pragma unroll
  for (int d = kLanes / 2; d > 0; d /= 2) {
    const T other = __shfl_xor_sync(kAllLanes, value, d);
    value = value > other ? value : other;
  }
  return value;
}

// The sum of the values of this lane and the lanes before it.
template <class T>
GZ_DEVICE T warp_scan(T value) {
#pragma unroll
  for (int d = 1; d < kLanes; d *= 2) {
    const T before = __shfl_up_sync(kAllLanes, value, d);
    if (lane() >= d) value += before;
  }
  return value;
}

// --- over a block; `partial` is shared memory for one value per warp
template <class T>
GZ_DEVICE T block_sum(T value, T* partial) {
  value = warp_sum(value);
  __syncthreads();  // `partial` is no longer in use
  if (lane() == 0) partial[warp()] = value;
  __syncthreads();
  return warp_sum(lane() < warps() ? partial[lane()] : T(0));
}

// The sum of the values of the threads before this one; *total is the sum of all.
template <class T>
GZ_DEVICE T block_scan(T value, T* partial, T* total) {
  const T upto = warp_scan(value);
  __syncthreads();
  if (lane() == kLanes - 1) partial[warp()] = upto;
  __syncthreads();
  const T sums = warp_scan(lane() < warps() ? partial[lane()] : T(0));
  *total = __shfl_sync(kAllLanes, sums, kLanes - 1);
  const T before = __shfl_sync(kAllLanes, sums, warp() > 0 ? warp() - 1 : 0);
  return upto - value + (warp() > 0 ? before : T(0));
}

// --- over the grid
// True in the last block to arrive of those that share a ticket; that block sees everything the others wrote. *ticket
// is 0 at launch.
GZ_DEVICE bool last_block(uint32_t* ticket, unsigned blocks = gridDim.x) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(ticket, 1u) == blocks - 1;
  __syncthreads();
  __threadfence();
  return last;
}

// f(x[i]) once for each i < n, distributed over `stride` threads: 16 bytes per load, four loads in flight.
template <class F>
GZ_DEVICE void for_each(const float* x, int64_t n, int64_t thread, int64_t stride, F f) {
  const int64_t misaligned = int64_t(reinterpret_cast<uintptr_t>(x) % 16) / 4;
  const int64_t head = misaligned && n > 4 - misaligned ? 4 - misaligned : misaligned ? n : 0;
  const float4* wide = reinterpret_cast<const float4*>(x + head);
  const int64_t count = (n - head) / 4, tail = head + 4 * count;
  int64_t i = thread;
  for (; i + 3 * stride < count; i += 4 * stride) {
    const float4 v[4] = {__ldg(wide + i), __ldg(wide + i + stride), __ldg(wide + i + 2 * stride),
                         __ldg(wide + i + 3 * stride)};
#pragma unroll
    for (int j = 0; j < 4; ++j) f(v[j].x), f(v[j].y), f(v[j].z), f(v[j].w);
  }
  for (; i < count; i += stride) {
    const float4 v = __ldg(wide + i);
    f(v.x), f(v.y), f(v.z), f(v.w);
  }
  if (thread < head) f(x[thread]);
  if (thread < n - tail) f(x[tail + thread]);
}

// The same over the grid, along x.
template <class F>
GZ_DEVICE void for_each(const float* x, int64_t n, F f) {
  for_each(x, n, grid_thread(), grid_threads(), f);
}

}  // namespace gradzip::cuda
