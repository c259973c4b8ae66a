// The calls of the CUDA runtime that the launchers make, on top of simt.h: replaces the real header when a .cu is
// compiled for the CPU. Streams are synchronous.
#pragma once

#include "simt.h"

using cudaStream_t = struct CUstream_st*;
enum cudaError_t { cudaSuccess = 0 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

namespace simt {
inline int launches = 0, memsets = 0;
}

template <class... P, class... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(P...), A&&... arguments) {
  ++simt::launches;
  if (!simt::options.dry)
    simt::launch(config->gridDim, config->blockDim, config->dynamicSmemBytes, [=] { kernel(P(arguments)...); });
  return cudaSuccess;
}

inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  ++simt::memsets;
  if (bytes && !simt::options.dry) std::memset(to, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  return *value = simt::options.multiprocessors, cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
