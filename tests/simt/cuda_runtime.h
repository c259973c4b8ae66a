// The calls of the CUDA runtime that the launchers make, on top of simt.h: replaces the real header when a .cu is
// compiled for the CPU. Streams are synchronous.
#pragma once

#include <string>

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
inline bool record = false;
inline std::vector<std::string> recorded;  // a line for each launch and fill, in the format of tests/simt/nvrtc/libcuda.cpp

template <class T>
std::string hex(const T& value) {
  std::string text = " ";
  for (size_t i = 0; i < sizeof value; ++i)
    for (int shift : {4, 0})
      text += "0123456789abcdef"[reinterpret_cast<const unsigned char*>(&value)[i] >> shift & 15];
  return text;
}
}  // namespace simt

template <class... P, class... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(P...), A&&... arguments) {
  ++simt::launches;
  if (simt::record) {
    const dim3 &grid = config->gridDim, &block = config->blockDim;
    std::string line = "launch";
    for (size_t n : {size_t(grid.x), size_t(grid.y), size_t(block.x), config->dynamicSmemBytes})
      line += " " + std::to_string(n);
    simt::recorded.push_back((line + ... + simt::hex<P>(arguments)));
  }
  if (!simt::options.dry)
    simt::launch(config->gridDim, config->blockDim, config->dynamicSmemBytes, [=] { kernel(P(arguments)...); });
  return cudaSuccess;
}

inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  ++simt::memsets;
  if (simt::record && bytes)
    simt::recorded.push_back("fill " + std::to_string(bytes) + " " + std::to_string(value) + simt::hex(to));
  if (bytes && !simt::options.dry) std::memset(to, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  return *value = simt::options.multiprocessors, cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
