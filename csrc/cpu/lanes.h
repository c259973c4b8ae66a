// Vectors with the same number of lanes for every instruction set: 16 floats or 8 doubles are one register of AVX-512,
// two of AVX2 or four of SSE2. Sums kept in lanes therefore have the same bits at every SIMD level. For the same reason
// they are written as a product and a sum, never as a fused multiply-add that only some levels have (cpu/vectors.h has one
// for all).
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/simd.h"

// Lanes are only ever passed to functions that are inlined: no calling convention is involved.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace gradzip::cpu {

typedef double Doubles __attribute__((vector_size(64)));
constexpr int64_t kFloats = 16, kDoubles = 8;

GZ_INLINE Doubles load(const double* x) {
  Doubles v;
  std::memcpy(&v, x, sizeof v);
  return v;
}
GZ_INLINE void store(double* x, const Doubles& v) { std::memcpy(x, &v, sizeof v); }

// The sum of the lanes, by halves.
GZ_INLINE double sum(const Doubles& v) {
  const double a = v[0] + v[4], b = v[1] + v[5], c = v[2] + v[6], d = v[3] + v[7];
  return (a + c) + (b + d);
}

}  // namespace gradzip::cpu
