// Kernels with a race each, which the thread sanitizer must report (races.h), and without it, which it must not. The
// first argument names the kernel; with a second one it has its race.
#include "check.h"

static std::string race;
static bool racy = false;

// Two kernels for all: what the first wrote, the second may read.
static void kernel(int* out, unsigned* count) {
  __shared__ int shared[64];
  __shared__ bool last;
  const unsigned thread = threadIdx.x, lane = thread % 32;
  if (race == "barrier") {  // in a block, another warp's shared memory
    shared[thread] = int(thread);
    if (!racy) __syncthreads();
    out[blockIdx.x * 64 + thread] = shared[63 - thread];
  }
  if (race == "second barrier") {  // the next tile's write, not ordered after this tile's read
    for (int tile = 0; tile < 2; ++tile) {
      shared[thread] = tile;
      __syncthreads();
      out[blockIdx.x * 64 + thread] = shared[63 - thread];
      if (!racy) __syncthreads();
    }
  }
  if (race == "warp") {  // in a warp; a shuffle waits for all lanes, but does not order memory
    shared[thread] = int(thread);
    racy ? void(__shfl_sync(~0u, thread, 0)) : __syncwarp();
    out[blockIdx.x * 64 + thread] = shared[thread ^ 1];
  }
  if (race == "atomic") {  // between blocks, one thread of each
    if (thread == 0) racy ? void(++*count) : void(atomicAdd(count, 1u));
  }
  if (race == "read") {  // of what other blocks change atomically
    if (thread == 0) atomicAdd(count, 1u);
    if (thread == 33) out[blockIdx.x] = racy ? int(*count) : int(atomicAdd(count, 0u));
  }
  if (race == "overlap") out[(blockIdx.x * (racy ? 63 : 64)) + thread] = 1;
  if (race == "flag") {  // all write the same
    if (lane == 0) racy ? void(*out = 1) : void(atomicExch(out, 1));
  }
  if (race == "fence") {  // the last block reads what the others wrote
    out[blockIdx.x * 64 + thread] = 1;
    if (!racy) __threadfence();
    __syncthreads();
    if (thread == 0) last = atomicAdd(count, 1u) == gridDim.x - 1;
    __syncthreads();
    if (!racy) __threadfence();
    int total = 0;
    for (unsigned b = 0; last && b < gridDim.x; ++b) total += out[b * 64 + thread];
    if (last) out[gridDim.x * 64 + thread] = total;
  }
}

static void after(const int* out, const unsigned* count, int* sums) {
  sums[threadIdx.x] = out[threadIdx.x] + int(*count);
}

int main(int arguments, char** argument) {
  race = argument[1];
  racy = arguments > 2;
  const simt::Buffer<int> out(std::vector<int>(320)), sums(64);
  const simt::Buffer<unsigned> count(std::vector<unsigned>{0});
  cudaLaunchConfig_t config;
  config.gridDim.x = 4;
  config.blockDim.x = 64;
  cudaLaunchKernelEx(&config, kernel, out.get(), count.get());
  config.gridDim.x = 1;
  cudaLaunchKernelEx(&config, after, out.get(), count.get(), sums.get());
}
