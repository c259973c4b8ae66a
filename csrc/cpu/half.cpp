#include "cpu/half.h"

#include "cpu/simd.h"

namespace gradzip::cpu {
namespace {

template <class T>
GZ_INLINE void widen(const T* x, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = to_float(x[i]);
}
template <class T>
GZ_INLINE void narrow(const float* x, int64_t n, T* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = rounded<T>(x[i]);
}

GZ_INLINE void widen_bfloat16_body(const BFloat16* x, int64_t n, float* out) { widen(x, n, out); }
GZ_INLINE void widen_float16_body(const Float16* x, int64_t n, float* out) { widen(x, n, out); }
GZ_INLINE void narrow_bfloat16_body(const float* x, int64_t n, BFloat16* out) { narrow(x, n, out); }
GZ_INLINE void narrow_float16_body(const float* x, int64_t n, Float16* out) { narrow(x, n, out); }
GZ_SIMD_DISPATCH(void, widen_bfloat16, (const BFloat16* x, int64_t n, float* out), (x, n, out))
GZ_SIMD_DISPATCH(void, widen_float16, (const Float16* x, int64_t n, float* out), (x, n, out))
GZ_SIMD_DISPATCH(void, narrow_bfloat16, (const float* x, int64_t n, BFloat16* out), (x, n, out))
GZ_SIMD_DISPATCH(void, narrow_float16, (const float* x, int64_t n, Float16* out), (x, n, out))

}  // namespace

void convert(const BFloat16* x, int64_t n, float* out) { widen_bfloat16(x, n, out); }
void convert(const Float16* x, int64_t n, float* out) { widen_float16(x, n, out); }
void convert(const float* x, int64_t n, BFloat16* out) { narrow_bfloat16(x, n, out); }
void convert(const float* x, int64_t n, Float16* out) { narrow_float16(x, n, out); }

}  // namespace gradzip::cpu
