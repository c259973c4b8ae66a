// Four neighbouring values per thread, 16 bytes per load or store if the memory is aligned.
#pragma once

#include "common/half.h"
#include "cuda/block/block.cuh"

namespace gradzip::cuda {

// Whether four values can be read or written at once at x, and at each multiple of four values from there.
GZ_DEVICE bool aligned4(const void* x) { return reinterpret_cast<uintptr_t>(x) % 16 == 0; }

// How many of the four values from `first` on are below n; negative if it is past n.
GZ_DEVICE int left4(int64_t first, int64_t n) { return int(n - first < 4 ? n - first : 4); }

// Four values at x; those from `left` on are 0. Reads memory that the kernel may change. wide: aligned4(x).
template <class Left>
GZ_DEVICE float4 load4(const float* x, Left left, bool wide) {
  if (wide && left >= 4) return *reinterpret_cast<const float4*>(x);
  return make_float4(left > 0 ? x[0] : 0.0f, left > 1 ? x[1] : 0.0f, left > 2 ? x[2] : 0.0f, left > 3 ? x[3] : 0.0f);
}

template <class Left>
GZ_DEVICE void store4(float* x, const float4& v, Left left, bool wide) {
  if (wide && left >= 4) {
    *reinterpret_cast<float4*>(x) = v;
    return;
  }
  if (left > 0) x[0] = v.x;
  if (left > 1) x[1] = v.y;
  if (left > 2) x[2] = v.z;
  if (left > 3) x[3] = v.w;
}

// Four values at x, of any type, which the kernel does not change. x is aligned to all of them.
GZ_DEVICE float4 load4(const float* x) { return __ldg(reinterpret_cast<const float4*>(x)); }
template <class T>
GZ_DEVICE float4 load4(const T* x) {
  static_assert(sizeof(T) == 2, "floats have an overload of their own");
  const unsigned long long four = __ldg(reinterpret_cast<const unsigned long long*>(x));
  const auto at = [&](int j) { return to_float(T{uint16_t(four >> (16 * j))}); };
  return make_float4(at(0), at(1), at(2), at(3));
}

// value[j] = x[first + j], 0 from n on. first is a multiple of 4. The kernel does not change x.
GZ_DEVICE void load4(const float* x, int64_t first, int64_t n, float* value) {
  if (first + 4 <= n && aligned4(x)) {
    const float4 v = load4(x + first);
    value[0] = v.x, value[1] = v.y, value[2] = v.z, value[3] = v.w;
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) value[j] = first + j < n ? __ldg(x + first + j) : 0.0f;
}

// The same for memory that the kernel may change.
GZ_DEVICE void load4_changing(const float* x, int64_t first, int64_t n, float* value) {
  const float4 v = load4(x + first, left4(first, n), aligned4(x));
  value[0] = v.x, value[1] = v.y, value[2] = v.z, value[3] = v.w;
}

// out[first + j] += value[j], below n.
GZ_DEVICE void add4(float* out, int64_t first, int64_t n, const float* value) {
  if (first + 4 <= n && aligned4(out)) {
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
GZ_DEVICE void store4(float* out, int64_t first, int64_t n, const float* value) {
  store4(out + first, make_float4(value[0], value[1], value[2], value[3]), left4(first, n), aligned4(out));
}

GZ_DEVICE void store4(int32_t* out, int64_t first, int64_t n, const int32_t* value) {
  if (first + 4 <= n && aligned4(out)) {
    *reinterpret_cast<int4*>(out + first) = make_int4(value[0], value[1], value[2], value[3]);
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (first + j < n) out[first + j] = value[j];
}

// *x, which the kernel does not change.
GZ_DEVICE float load1(const float* x) { return __ldg(x); }
template <class T>
GZ_DEVICE float load1(const T* x) {
  return to_float(T{__ldg(reinterpret_cast<const uint16_t*>(x))});
}

// The same of 16-bit floats, 8 bytes per load or store if the memory is aligned.
template <class T>
GZ_DEVICE void load4(const T* x, int64_t first, int64_t n, float* value) {
  static_assert(sizeof(T) == 2, "floats have overloads of their own");
  if (first + 4 <= n && reinterpret_cast<uintptr_t>(x) % 8 == 0) {
    const float4 v = load4(x + first);
    value[0] = v.x, value[1] = v.y, value[2] = v.z, value[3] = v.w;
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) value[j] = first + j < n ? load1(x + first + j) : 0.0f;
}

// f(x[i]) once for each i < n, distributed over `stride` threads.
template <class T, class F>
GZ_DEVICE void for_each_half(const T* x, int64_t n, int64_t thread, int64_t stride, F f) {
#pragma unroll 4
  for (int64_t first = 4 * thread; first < n; first += 4 * stride) {
    float value[4];
    load4(x, first, n, value);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (first + j < n) f(value[j]);
  }
}

template <class T>
GZ_DEVICE void store4(T* out, int64_t first, int64_t n, const float* value) {
  static_assert(sizeof(T) == 2, "floats have overloads of their own");
  if (first + 4 <= n && reinterpret_cast<uintptr_t>(out) % 8 == 0) {
    unsigned long long four = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) four |= static_cast<unsigned long long>(rounded<T>(value[j]).bits) << (16 * j);
    *reinterpret_cast<unsigned long long*>(out + first) = four;
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (first + j < n) out[first + j] = rounded<T>(value[j]);
}

template <class T>
GZ_DEVICE void store1(T* out, float value) {
  *out = rounded<T>(value);
}

// f(x as a pointer to numbers of this type).
template <class F>
GZ_DEVICE void typed_in(const void* x, int64_t dtype, F f) {
  if (dtype == int64_t(Dtype::bfloat16))
    f(static_cast<const BFloat16*>(x));
  else if (dtype == int64_t(Dtype::float16))
    f(static_cast<const Float16*>(x));
  else
    f(static_cast<const float*>(x));
}

// The same of memory to write to.
template <class F>
GZ_DEVICE void typed_out(void* out, int64_t dtype, F f) {
  if (dtype == int64_t(Dtype::bfloat16))
    f(static_cast<BFloat16*>(out));
  else if (dtype == int64_t(Dtype::float16))
    f(static_cast<Float16*>(out));
  else
    f(static_cast<float*>(out));
}

// The value of elements that cannot be decoded, NaN: nobody may be reading the flag, and a non-finite average makes
// every rank skip the step.
GZ_DEVICE float undecodable() { return bits_float(0x7fc00000u); }

}  // namespace gradzip::cuda
