// Replaces <cuda_runtime.h> in a build without nvcc. The host compiler reads the kernels of csrc/cuda for their names
// and parameters only, and NVRTC compiles them at run time: what kernels call is declared here, and defined nowhere.
#pragma once

#include <cmath>
#include <cstddef>
#include <type_traits>

#include "nvrtc/driver.h"

// --- the language
#define __global__ inline  // not emitted, since nothing calls it
#define __device__
#define __constant__
#define __host__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
extern const dim3 threadIdx, blockIdx, blockDim, gridDim;

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) ulonglong2 {
  unsigned long long x, y;
};
float4 make_float4(float, float, float, float);
int4 make_int4(int, int, int, int);

void __syncthreads();
int __syncthreads_count(int);
void __syncwarp(unsigned mask = ~0u);
void __threadfence();
void __threadfence_block();

template <class T>
T __shfl_sync(unsigned mask, T, int source);
template <class T>
T __shfl_xor_sync(unsigned mask, T, int lanes);
template <class T>
T __shfl_up_sync(unsigned mask, T, unsigned delta);
template <class T>
T __shfl_down_sync(unsigned mask, T, unsigned delta);
unsigned __ballot_sync(unsigned mask, int);
int __any_sync(unsigned mask, int);
int __all_sync(unsigned mask, int);

template <class T>
T atomicAdd(T*, std::common_type_t<T>);
template <class T>
T atomicMax(T*, std::common_type_t<T>);
template <class T>
T atomicMin(T*, std::common_type_t<T>);
template <class T>
T atomicOr(T*, std::common_type_t<T>);
template <class T>
T atomicAnd(T*, std::common_type_t<T>);
template <class T>
T atomicExch(T*, std::common_type_t<T>);
template <class T>
T atomicCAS(T*, std::common_type_t<T> expected, std::common_type_t<T>);

template <class T>
T __ldg(const T*);
double __dsqrt_rn(double);
int __popc(unsigned);
int __popcll(unsigned long long);
int __ffs(int);
int __clz(int);
unsigned __float_as_uint(float);
float __uint_as_float(unsigned);

// --- the calls of the runtime that launchers make, by those of the driver (driver.cpp)
using cudaStream_t = struct CUstream_st*;
enum cudaError_t : int { cudaSuccess = 0 };  // and the driver's errors
enum cudaDeviceAttr : int { cudaDevAttrMultiProcessorCount = 16 };

struct cudaDeviceProp {
  char name[256];
  int major, minor;
  size_t totalGlobalMem;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

cudaError_t cudaRuntimeGetVersion(int*);  // 0: there is none
cudaError_t cudaDriverGetVersion(int*);
cudaError_t cudaGetDeviceCount(int*);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp*, int device);
cudaError_t cudaGetDevice(int*);
cudaError_t cudaDeviceGetAttribute(int*, cudaDeviceAttr, int device);
cudaError_t cudaMemsetAsync(void*, int value, size_t nbytes, cudaStream_t);
cudaError_t cudaGetLastError();
const char* cudaGetErrorString(cudaError_t);
cudaError_t cudaLaunch(const cudaLaunchConfig_t&, gradzip::driver::Entry&, void** arguments);

template <class... P, class... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, gradzip::driver::Kernel<P...> kernel, A... arguments) {
  static_assert((std::is_same_v<P, A> && ...), "the driver is told no sizes: it reads those of the parameters");
  void* addresses[] = {&arguments...};
  return cudaLaunch(*config, *kernel.entry, addresses);
}
