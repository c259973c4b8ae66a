// Four neighbouring values per thread, 16 bytes per load or store if the memory is aligned.
#pragma once

#include "cuda/block.cuh"

namespace gradzip::cuda {

// value[j] = x[first + j], 0 from n on. first is a multiple of 4.
GZ_DEVICE void load4(const float* x, int64_t first, int64_t n, float* value) {
  if (first + 4 <= n && reinterpret_cast<uintptr_t>(x) % 16 == 0) {
    const float4 v = __ldg(reinterpret_cast<const float4*>(x + first));
    value[0] = v.x, value[1] = v.y, value[2] = v.z, value[3] = v.w;
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) value[j] = first + j < n ? __ldg(x + first + j) : 0.0f;
}

// The same for memory that the kernel changes.
GZ_DEVICE void load4_changing(const float* x, int64_t first, int64_t n, float* value) {
  if (first + 4 <= n && reinterpret_cast<uintptr_t>(x) % 16 == 0) {
    const float4 v = *reinterpret_cast<const float4*>(x + first);
    value[0] = v.x, value[1] = v.y, value[2] = v.z, value[3] = v.w;
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) value[j] = first + j < n ? x[first + j] : 0.0f;
}

// out[first + j] += value[j], below n.
GZ_DEVICE void add4(float* out, int64_t first, int64_t n, const float* value) {
  if (first + 4 <= n && reinterpret_cast<uintptr_t>(out) % 16 == 0) {
    float4* at = reinterpret_cast<float4*>(out + first);
    const float4 v = *at;
    *at = make_float4(v.x + value[0], v.y + value[1], v.z + value[2], v.w + value[3]);
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (first + j < n) out[first + j] += value[j];
}

// out[first + j] = value[j], below n.
GZ_DEVICE void store4(int32_t* out, int64_t first, int64_t n, const int32_t* value) {
  if (first + 4 <= n && reinterpret_cast<uintptr_t>(out) % 16 == 0) {
    *reinterpret_cast<int4*>(out + first) = make_int4(value[0], value[1], value[2], value[3]);
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (first + j < n) out[first + j] = value[j];
}

GZ_DEVICE void store4(float* out, int64_t first, int64_t n, const float* value) {
  if (first + 4 <= n && reinterpret_cast<uintptr_t>(out) % 16 == 0) {
    *reinterpret_cast<float4*>(out + first) = make_float4(value[0], value[1], value[2], value[3]);
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (first + j < n) out[first + j] = value[j];
}

// The value of elements that cannot be decoded, NaN: nobody may be reading the flag, and a non-finite average makes
// every rank skip the step.
GZ_DEVICE float undecodable() { return bits_float(0x7fc00000u); }

}  // namespace gradzip::cuda
