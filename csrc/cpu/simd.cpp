#include "cpu/simd.h"

#include <atomic>
#include <stdexcept>

namespace gradzip::cpu {

Simd best_simd() {
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return Simd::avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
    return Simd::avx2;
  return Simd::scalar;
}

namespace {
std::atomic<Simd>& level() {
  static std::atomic<Simd> value{best_simd()};
  return value;
}
}  // namespace

Simd simd() { return level().load(std::memory_order_relaxed); }

void set_simd(Simd wanted) {
  if (wanted > best_simd()) throw std::invalid_argument("this processor does not have that instruction set");
  level().store(wanted);
}

}  // namespace gradzip::cpu
