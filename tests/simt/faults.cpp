// Kernels with one fault each, which simt.h must report. The argument names the fault.
#include "check.h"

static std::string fault;

static void kernel(int* out) {
  __shared__ int shared[64];
  const unsigned thread = threadIdx.x, lane = thread % 32;
  if (fault == "none") {
    shared[thread] = int(thread);
    __syncthreads();
    out[thread] = __shfl_xor_sync(~0u, shared[63 - thread], 1);
  }
  if (fault == "exit" && thread == 40) return;
  if (fault == "exit") __syncthreads();
  if (fault == "barriers") {
    if (thread < 32)
      __syncthreads();
    else
      __syncthreads();
  }
  if (fault == "warp-and-barrier") {
    if (lane == 3)
      __syncthreads();
    else
      __syncwarp();
  }
  if (fault == "collectives") out[thread] = lane < 16 ? int(__ballot_sync(~0u, 1)) : __any_sync(~0u, 1);
  if (fault == "left-out") out[thread] = int(__ballot_sync(0xffff, 1));
  if (fault == "outside") {
    if (lane < 16) out[thread] = __shfl_sync(0xffff, int(lane), 20);
  }
  if (fault == "missing-barrier") {
    shared[thread] = int(thread) + 1;
    out[thread] = shared[63 - thread];
    if (out[thread] != 64 - int(thread)) simt::fail("reads what is not there yet");
  }
  if (fault == "shared-bounds") shared[thread + 1] = 1;
  if (fault == "dynamic-bounds") {
    GZ_DYNAMIC_SHARED(int, memory);
    memory[thread] = 1;
  }
}

int main(int, char** arguments) {
  fault = arguments[1];
  const simt::Buffer<int> out(64);
  cudaLaunchConfig_t config;
  config.blockDim.x = fault == "block-size" ? 48 : 64;
  config.dynamicSmemBytes = 63 * sizeof(int);
  cudaLaunchKernelEx(&config, kernel, out.get());
  for (int i = 0; i < 64 && fault == "none"; ++i)
    if (out[i] != 63 - (i ^ 1)) return 1;
}
