// 16-bit floats by way of a buffer of floats, for kernels that compute with floats. Floats are used where they are.
#pragma once

#include "common/half.h"

namespace gradzip::cpu {

// out[i] = x[i], for n elements.
void convert(const BFloat16* x, int64_t n, float* out);
void convert(const Float16* x, int64_t n, float* out);
void convert(const float* x, int64_t n, BFloat16* out);
void convert(const float* x, int64_t n, Float16* out);

// n elements of x as floats: in `buffer`, unless they are floats.
inline const float* as_floats(const float* x, int64_t, float*) { return x; }
template <class T>
const float* as_floats(const T* x, int64_t n, float* buffer) {
  convert(x, n, buffer);
  return buffer;
}

// Where to compute the elements of `out`: `buffer`, unless they are floats. Then, `write` writes n of them to `out`.
inline float* room_for(float* out, float*) { return out; }
template <class T>
float* room_for(T*, float* buffer) {
  return buffer;
}
inline void write(const float*, int64_t, float*) {}
template <class T>
void write(const float* buffer, int64_t n, T* out) {
  convert(buffer, n, out);
}

}  // namespace gradzip::cpu
