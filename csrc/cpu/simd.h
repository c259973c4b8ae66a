// One source, three instruction sets, chosen at run time.
//
// Functions carry target attributes. Whole translation units are never compiled with -mavx512f: an inline function
// of a standard header instantiated there could be the copy the linker keeps for everybody.
#pragma once

#include <immintrin.h>

#include <cstdint>

// The intrinsics of g++ 12 initialise undefined registers with themselves, which it then warns about.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#define GZ_INLINE inline __attribute__((always_inline))
#define GZ_AVX2 __attribute__((target("avx2,fma,bmi,bmi2,lzcnt,popcnt")))
#define GZ_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,bmi,bmi2,lzcnt,popcnt,prefer-vector-width=512")))

namespace gradzip::cpu {

enum class Simd : int { scalar = 0, avx2 = 1, avx512 = 2 };

Simd best_simd();          // the highest level of this processor
Simd simd();               // the level that kernels use
void set_simd(Simd level); // tests run all three; throws std::invalid_argument beyond best_simd()

}  // namespace gradzip::cpu

// GZ_SIMD_SELECT(float, sum, (const float* x, int64_t n), (x, n)) defines sum(x, n), which calls sum_scalar, sum_avx2
// or sum_avx512, all three written by hand.
#define GZ_SIMD_SELECT(RESULT, NAME, PARAMETERS, ARGUMENTS) \
  static RESULT NAME PARAMETERS {                           \
    switch (simd()) {                                       \
      case Simd::avx512:                                    \
        return NAME##_avx512 ARGUMENTS;                     \
      case Simd::avx2:                                      \
        return NAME##_avx2 ARGUMENTS;                       \
      default:                                              \
        return NAME##_scalar ARGUMENTS;                     \
    }                                                       \
  }

// The same, with the three compiled from one `GZ_INLINE RESULT sum_body(...)` that the compiler vectorises.
#define GZ_SIMD_DISPATCH(RESULT, NAME, PARAMETERS, ARGUMENTS)                        \
  static RESULT NAME##_scalar PARAMETERS { return NAME##_body ARGUMENTS; }           \
  GZ_AVX2 static RESULT NAME##_avx2 PARAMETERS { return NAME##_body ARGUMENTS; }     \
  GZ_AVX512 static RESULT NAME##_avx512 PARAMETERS { return NAME##_body ARGUMENTS; } \
  GZ_SIMD_SELECT(RESULT, NAME, PARAMETERS, ARGUMENTS)

// The same, of one `template <int kBytes> GZ_INLINE RESULT sum_body(...)`, where kBytes is the size of a register.
#define GZ_SIMD_DISPATCH_BYTES(RESULT, NAME, PARAMETERS, ARGUMENTS)                      \
  static RESULT NAME##_scalar PARAMETERS { return NAME##_body<16> ARGUMENTS; }           \
  GZ_AVX2 static RESULT NAME##_avx2 PARAMETERS { return NAME##_body<32> ARGUMENTS; }     \
  GZ_AVX512 static RESULT NAME##_avx512 PARAMETERS { return NAME##_body<64> ARGUMENTS; } \
  GZ_SIMD_SELECT(RESULT, NAME, PARAMETERS, ARGUMENTS)
