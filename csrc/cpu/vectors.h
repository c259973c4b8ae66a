// Vectors of one register of any instruction set, for kernels that keep many sums in registers. A sum that has a lane of
// its own, with its terms in order, has the same bits whatever the number of lanes.
#pragma once

#include <type_traits>

#include "cpu/lanes.h"

namespace gradzip::cpu {

template <class T, int kBytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(kBytes)));
  static constexpr int64_t lanes = kBytes / int64_t(sizeof(T));
};
template <class T, int kBytes>
using Vector = typename VectorOf<T, kBytes>::type;

template <int kBytes, class T>
GZ_INLINE Vector<T, kBytes> load(const T* x) {
  Vector<T, kBytes> v;
  std::memcpy(&v, x, sizeof v);
  return v;
}
template <int kBytes, class T>
GZ_INLINE void store(T* x, const Vector<T, kBytes>& v) {
  std::memcpy(x, &v, sizeof v);
}
// The sum of kFloats lanes, by halves.
template <int kBytes, int V>
GZ_INLINE float sum(const Vector<float, kBytes> (&v)[V]) {
  static_assert(V * VectorOf<float, kBytes>::lanes == kFloats);
  Vector<float, 16> four[4];
  std::memcpy(four, v, sizeof four);
  const auto s = (four[0] + four[2]) + (four[1] + four[3]);
  return (s[0] + s[2]) + (s[1] + s[3]);
}
// These are the builtins of intrinsics, which a function may name that is inlined into ones of several targets. Of the
// compiler's own operations some become an instruction for each lane there, and it has none for a sum of products.

// All lanes *x.
template <int kBytes, class T>
GZ_INLINE Vector<T, kBytes> all_lanes(const T* x) {
  constexpr bool kDouble = sizeof(T) == 8;
  if constexpr (kBytes == 64 && kDouble)
    return __builtin_ia32_broadcastsd512(Vector<T, 16>{*x}, Vector<T, kBytes>{}, -1);
  else if constexpr (kBytes == 64)
    return __builtin_ia32_broadcastss512(Vector<T, 16>{*x}, Vector<T, kBytes>{}, -1);
  else if constexpr (kBytes == 32 && kDouble)
    return __builtin_ia32_vbroadcastsd256(x);
  else if constexpr (kBytes == 32)
    return __builtin_ia32_vbroadcastss256(x);
  else if constexpr (kDouble)
    return Vector<T, kBytes>{*x, *x};
  else
    return Vector<T, kBytes>{*x, *x, *x, *x};
}

// The first `count` lanes from x, which may be none; the others are 0, and not read.
template <int kBytes>
GZ_INLINE Vector<float, kBytes> load_first(const float* x, int64_t count) {
  if constexpr (kBytes == 64) {
    const auto mask = count >= 16 ? 0xffffu : count > 0 ? (1u << count) - 1 : 0u;
    return __builtin_ia32_loadups512_mask(x, Vector<float, kBytes>{}, uint16_t(mask));
  } else if constexpr (kBytes == 32) {
    using Ints = Vector<int32_t, kBytes>;
    const Ints mask = Ints{0, 1, 2, 3, 4, 5, 6, 7} < int32_t(count);
    return __builtin_ia32_maskloadps256(reinterpret_cast<const Vector<float, kBytes>*>(x), mask);
  } else {
    Vector<float, kBytes> v = {};
    for (int i = 0; i < 4; ++i)
      if (i < count) v[i] = x[i];
    return v;
  }
}

// a b + c of floats, rounded once.
template <int kBytes>
GZ_INLINE Vector<float, kBytes> fused(const Vector<float, kBytes>& a, const Vector<float, kBytes>& b,
                                      const Vector<float, kBytes>& c) {
  if constexpr (kBytes == 64) {
    return __builtin_ia32_vfmaddps512_mask(a, b, c, -1, _MM_FROUND_CUR_DIRECTION);
  } else if constexpr (kBytes == 32) {
    return __builtin_ia32_vfmaddps256(a, b, c);
  } else {
    // Without the instruction: the product is exact in double. The sum is rounded to odd there (an inexact one gets the
    // neighbour whose last bit is set), after which rounding to float is as of the exact sum (Boldo and Melquiond,
    // Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd, IEEE Trans. Comput. 2008).
    float out[4];
    for (int i = 0; i < 4; i += 2) {
      using Pair = Vector<double, 16>;
      using Bits = Vector<int64_t, 16>;
      const Pair product = Pair{a[i], a[i + 1]} * Pair{b[i], b[i + 1]}, term = {c[i], c[i + 1]};
      const Pair sum = product + term, rest = sum - product, error = (product - (sum - rest)) + (term - rest);
      const Bits up = Bits(error > 0.0) ^ Bits(sum < 0.0), inexact = Bits(error > 0.0) | Bits(error < 0.0);
      const Bits odd = Bits(sum) + ((-(up + up) - 1) & inexact & ((Bits(sum) & 1) - 1));
      out[i] = float(Pair(odd)[0]), out[i + 1] = float(Pair(odd)[1]);
    }
    return load<16>(out);
  }
}

// Floats as doubles, and back. kWide: bytes of the doubles, if those are more than a register of kBytes.
template <int kBytes, int kWide = kBytes>
GZ_INLINE Vector<double, kWide> widened(const float* x) {
  const auto v = load<kWide / 2>(x);
  if constexpr (kBytes == 64)
    return __builtin_ia32_cvtps2pd512_mask(v, Vector<double, kWide>{}, -1, _MM_FROUND_CUR_DIRECTION);
  else if constexpr (kBytes == 32)
    return __builtin_ia32_cvtps2pd256(v);
  else
    return __builtin_convertvector(v, Vector<double, kWide>);
}
template <int kBytes, int kWide = kBytes>
GZ_INLINE Vector<float, kWide / 2> narrowed(const Vector<double, kWide>& v) {
  if constexpr (kBytes == 64)
    return __builtin_ia32_cvtpd2ps512_mask(v, Vector<float, kWide / 2>{}, -1, _MM_FROUND_CUR_DIRECTION);
  else if constexpr (kBytes == 32)
    return __builtin_ia32_cvtpd2ps256(v);
  else
    return __builtin_convertvector(v, Vector<float, kWide / 2>);
}

constexpr int kBytesTogether = 32;

// 32 integers as bytes (int8_t or uint8_t), which they fit. Of a loop, g++ would make twice as many instructions of
// AVX2: it clears what is above a byte, and orders what it has packed at every step.
template <int kBytes, class Byte>
GZ_INLINE void to_bytes(const int32_t* wide, Byte* bytes) {
  if constexpr (kBytes == 32) {
    using Ints = Vector<int32_t, 32>;
    const auto first = __builtin_ia32_packssdw256(load<32>(wide), load<32>(wide + 8));
    const auto second = __builtin_ia32_packssdw256(load<32>(wide + 16), load<32>(wide + 24));
    Ints halves;
    if constexpr (std::is_signed_v<Byte>)
      halves = Ints(__builtin_ia32_packsswb256(first, second));
    else
      halves = Ints(__builtin_ia32_packuswb256(first, second));
    const Ints order = {0, 4, 1, 5, 2, 6, 3, 7};  // packing is within halves of a register
    const Ints packed = Ints(__builtin_ia32_permvarsi256(halves, order));
    std::memcpy(bytes, &packed, sizeof packed);
  } else {
    for (int i = 0; i < kBytesTogether; ++i) bytes[i] = Byte(wide[i]);
  }
}

}  // namespace gradzip::cpu
