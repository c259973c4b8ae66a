// Attributes that let one header serve g++, nvcc and NVRTC.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define GZ_HD __host__ __device__ __forceinline__
#else
#define GZ_HD inline __attribute__((always_inline))
#endif
