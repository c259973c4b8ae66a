// Orthonormal transforms of short blocks, and the order of their coefficients.
//
// Every function is a fixed sequence of sums and products, written once for a vector of rows (CPU) and for a float
// (CUDA): finite coefficients have the same bits on every instruction set, thread count and device (but for the sign of
// zero).
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "common/range_float.h"

namespace gradzip {

// --- which transform, and where its coefficients go

enum class TransformKind : int {
  dct = 0,  // DCT-II, separable along up to three axes; no axes is the identity
  fourier = 1,  // real Fourier transform of a power of two; its coefficients are complex numbers
  pairs = 2,  // no transform: the data are complex numbers
};

constexpr int kMostKernel = 128;  // positions of a separable transform
constexpr int kMostAxis = 16;  // length of one of its axes
constexpr int kMostFourier = 1024;
constexpr int64_t kTransformTile = 8192;  // elements, at most: 32 KiB

// Rows of `length` consecutive elements are transformed. Tiles of `tile` elements, whole rows, are coded independently.
// Within a tile, coefficients are ordered by plane: coefficient p of every row, then coefficient p + 1 of every row.
// The elements after the last whole row follow as they are. Complex coefficients (group = 2) are the pairs (2 p, 2 p +
// 1) of real ones, in the same order; an array of coefficients holds the real parts of a tile, then its imaginary parts.
// A last element without a partner has the imaginary part 0.
struct TransformLayout {
  TransformKind kind;
  int axes[3];
  int length, group;  // group: 1 or 2
  int64_t n, tile, tiles;

  GZ_HD int64_t begin(int64_t t) const { return t * tile; }
  GZ_HD int64_t count(int64_t t) const { return n - t * tile < tile ? n - t * tile : tile; }  // elements of tile t
  GZ_HD int64_t groups_of(int64_t elements) const { return (elements + group - 1) >> (group - 1); }
  GZ_HD int64_t groups() const { return groups_of(n); }
  GZ_HD int64_t tile_groups() const { return tile >> (group - 1); }  // of all tiles but the last; a multiple of 64
  // Whether the transform is a DCT by way of the Fourier transform.
  GZ_HD bool long_dct() const { return kind == TransformKind::dct && axes[0] > kMostAxis; }
  GZ_HD bool uses_fourier() const { return kind == TransformKind::fourier || long_dct(); }
};

GZ_HD bool is_power_of_two(int v) { return v > 0 && (v & (v - 1)) == 0; }

// The rows of a tile, a power of two. If the length is none, there are at least 64, so that a tile has whole words of a
// status bitmap.
GZ_HD constexpr int tile_rows(int length) {
  int rows = 1;
  while (2 * rows * length <= kTransformTile) rows *= 2;
  return rows;
}

// A transform as one number, little-endian bytes: the kind; three lengths less one for `dct`, log2 of the length for
// `fourier`. Returns false for a code that stands for no transform.
GZ_HD bool make_layout(uint32_t code, int64_t n, TransformLayout* layout) {
  layout->kind = TransformKind(code & 255);
  layout->n = n;
  layout->group = 2;
  layout->length = 1;
  for (int i = 0; i < 3; ++i) layout->axes[i] = 1;
  if (layout->kind == TransformKind::dct) {
    layout->group = 1;
    bool kernel = true;
    for (int i = 0; i < 3; ++i) {
      layout->axes[i] = int(code >> (8 * i + 8) & 255) + 1;
      layout->length *= layout->axes[i];
      kernel = kernel && layout->axes[i] <= kMostAxis;
    }
    const bool one_axis = layout->length == layout->axes[0] && is_power_of_two(layout->length);
    if (!(kernel && layout->length <= kMostKernel) && !one_axis) return false;
  } else if (layout->kind == TransformKind::fourier) {
    const uint32_t log2 = code >> 8;
    if (log2 < 3 || log2 > 10) return false;
    layout->length = 1 << log2;
  } else if (code == uint32_t(TransformKind::pairs)) {
    layout->length = 2;
  } else {
    return false;
  }
  layout->tile = tile_rows(layout->length) * layout->length;
  layout->tiles = (n + layout->tile - 1) / layout->tile;
  return true;
}

// Elements, of the type `dtype` (common/half.h), of whose coefficients the k groups of largest magnitude are selected.
struct TransformSource {
  const void* x;
  int64_t dtype, n, k;
  float* scratch;
  int64_t scratch_numel;
  uint8_t* bitmap;
  float* values;
};
static_assert(sizeof(TransformSource) == 64, "gradzip/ops/transform.py writes it");

// Selected coefficients, for transform_decode: the status bitmap of the groups, and the codes of their coefficients.
struct TransformPart {
  const uint8_t* bitmap;
  const uint8_t* packed;
  int64_t packed_nbytes;
  int64_t count;  // of groups
  const uint8_t*
      wire;  // of the format: 8 bytes, at any address; `format` has the expected bits only. Null: `format` is it
  RangeFloat format;
};
static_assert(sizeof(TransformPart) == 72, "gradzip/ops/groups.py writes it");
constexpr int kMostParts = 16;  // of a sum

// The power of two that scales amax into [1, 2): energies do not overflow, and those of values above 1e-19 amax do not
// underflow.
GZ_HD float unit_scale(float amax) {
  const int exponent = int(float_bits(amax) >> 23);
  const int inverse = 254 - exponent;
  return bits_float(uint32_t(inverse < 1 ? 1 : inverse) << 23);
}

// --- constants, computed by the compiler in double precision

// cos and sin of 2 pi i / n for 0 <= i < n, exact where they are 0 or 1. Reduced to the first eighth of the circle, where
// the series converge to double precision in ten terms.
struct CosSin {
  double c, s;
};
constexpr CosSin cos_sin(int i, int n) {
  if (2 * i > n) {
    const CosSin r = cos_sin(n - i, n);
    return {r.c, -r.s};
  }
  if (4 * i > n) {
    const CosSin r = cos_sin(n - 2 * i, 2 * n);
    return {-r.c, r.s};
  }
  if (8 * i > n) {
    const CosSin r = cos_sin(n - 4 * i, 4 * n);
    return {r.s, r.c};
  }
  const double x = 6.283185307179586476925286766559 * i / n;
  CosSin r{1.0, x};
  double c = 1.0, s = x;
  for (int k = 1; k <= 10; ++k) {
    c *= -x * x / ((2 * k - 1) * (2 * k));
    s *= -x * x / ((2 * k) * (2 * k + 1));
    r.c += c;
    r.s += s;
  }
  return r;
}

constexpr double square_root(double x) {
  double r = x > 1.0 ? x : 1.0;
  for (int i = 0; i < 60; ++i) r = 0.5 * (r + x / r);
  return r;
}

// exp(-2 pi i j / 1024) for the first half of the circle: re, im.
struct Twiddles {
  float of[kMostFourier / 2][2] = {};
  constexpr Twiddles() {
    for (int j = 0; j < kMostFourier / 2; ++j) {
      const CosSin w = cos_sin(j, kMostFourier);
      of[j][0] = float(w.c);
      of[j][1] = float(-w.s);
    }
  }
};

// Row k of the DCT-II matrix of length N; its second half is its first half mirrored, with the sign of (-1)^k.
template <int N>
struct DctMatrix {
  static constexpr int kHalf = (N + 1) / 2;
  float of[N][kHalf] = {};
  constexpr DctMatrix() {
    for (int k = 0; k < N; ++k)
      for (int i = 0; i < kHalf; ++i)
        of[k][i] = float(cos_sin((2 * i + 1) * k % (4 * N), 4 * N).c * square_root((k ? 2.0 : 1.0) / N));
  }
};

// sqrt(1 / length) and half of sqrt(2 / length) for a power of two.
GZ_HD float unit_factor(int length) {
  float power = 1.0f;
  for (; length >= 4; length /= 4) power *= 0.5f;
  return length == 2 ? power * 0.70710678118654752440f : power;
}
GZ_HD float half_factor(int length) { return unit_factor(2 * length); }

// --- DCT-II of N <= kMostAxis elements p[0], p[stride], ..., in place

template <int N, class V>
GZ_HD void dct_forward(V* p, int stride) {
  constexpr DctMatrix<N> matrix;
  constexpr int half = N / 2, middle = N % 2;
  V sum[half + 1], difference[half + 1];
  for (int i = 0; i < half; ++i) {
    const V a = p[i * stride], b = p[(N - 1 - i) * stride];
    sum[i] = a + b;
    difference[i] = a - b;
  }
  if (middle) sum[half] = p[half * stride];
  for (int k = 0; k < N; ++k) {
    const V* from = k % 2 ? difference : sum;
    V y = matrix.of[k][0] * from[0];
    for (int i = 1; i < half + (k % 2 ? 0 : middle); ++i) y = y + matrix.of[k][i] * from[i];
    p[k * stride] = y;
  }
}

template <int N, class V>
GZ_HD void dct_inverse(V* p, int stride) {
  constexpr DctMatrix<N> matrix;
  constexpr int half = N / 2, middle = N % 2;
  V y[N];
  for (int k = 0; k < N; ++k) y[k] = p[k * stride];
  for (int i = 0; i < half + middle; ++i) {
    V even = matrix.of[0][i] * y[0];
    for (int k = 2; k < N; k += 2) even = even + matrix.of[k][i] * y[k];
    if (i == half) {
      p[i * stride] = even;
      continue;
    }
    V odd = matrix.of[1][i] * y[1];
    for (int k = 3; k < N; k += 2) odd = odd + matrix.of[k][i] * y[k];
    p[i * stride] = even + odd;
    p[(N - 1 - i) * stride] = even - odd;
  }
}

template <class V>
GZ_HD void dct_axis(V* p, int stride, int length, bool inverse) {
#define GZ_AXIS(N)               \
  case N:                        \
    if (inverse)                 \
      dct_inverse<N>(p, stride); \
    else                         \
      dct_forward<N>(p, stride); \
    break;
  switch (length) {
    GZ_AXIS(2)
    GZ_AXIS(3)
    GZ_AXIS(4)
    GZ_AXIS(5)
    GZ_AXIS(6)
    GZ_AXIS(7)
    GZ_AXIS(8)
    GZ_AXIS(9)
    GZ_AXIS(10)
    GZ_AXIS(11)
    GZ_AXIS(12)
    GZ_AXIS(13)
    GZ_AXIS(14)
    GZ_AXIS(15)
    GZ_AXIS(16)
  }
#undef GZ_AXIS
}

// --- real Fourier transform of 2 M elements, as a complex one of M = 2^m numbers (re, im)
//
// forward: M bit-reversed complex numbers, stages with half = 1, 2, 4, ..., then `untangle`. inverse: `tangle`, stages
// with half = M / 2, ..., 2, 1, whose result is bit-reversed. Both are orthonormal.

// a, b = a + w b, a - w b
template <class V>
GZ_HD void butterfly(V* a, V* b, const float* w) {
  const V re = b[0] * w[0] - b[1] * w[1], im = b[0] * w[1] + b[1] * w[0];
  b[0] = a[0] - re;
  b[1] = a[1] - im;
  a[0] = a[0] + re;
  a[1] = a[1] + im;
}

// a, b = a + b, conj(w) (a - b)
template <class V>
GZ_HD void inverse_butterfly(V* a, V* b, const float* w) {
  const V re = a[0] - b[0], im = a[1] - b[1];
  a[0] = a[0] + b[0];
  a[1] = a[1] + b[1];
  b[0] = re * w[0] + im * w[1];
  b[1] = im * w[0] - re * w[1];
}

// The same for w = 1 and for w = -i, which need no multiplication (and give the same bits, but for the sign of zero).
template <class V>
GZ_HD void unit_butterfly(V* a, V* b) {
  const V re = b[0], im = b[1];
  b[0] = a[0] - re, b[1] = a[1] - im;
  a[0] = a[0] + re, a[1] = a[1] + im;
}
template <class V>
GZ_HD void quarter_butterfly(V* a, V* b) {
  const V re = b[1], im = -b[0];
  b[0] = a[0] - re, b[1] = a[1] - im;
  a[0] = a[0] + re, a[1] = a[1] + im;
}
template <class V>
GZ_HD void inverse_quarter_butterfly(V* a, V* b) {
  const V re = a[0] - b[0], im = a[1] - b[1];
  a[0] = a[0] + b[0], a[1] = a[1] + b[1];
  b[0] = -im, b[1] = re;
}

// The twiddle factor of butterfly j of 0 <= j < half.
GZ_HD const float* twiddle(const float (*twiddles)[2], int j, int half) {
  return twiddles[j * (kMostFourier / 2 / half)];
}

// From Z to the coefficients k and M - k, 0 < k < M / 2, in place; `w` is exp(-2 pi i k / (2 M)).
template <class V>
GZ_HD void untangle(V* a, V* b, const float* w, float factor) {
  const V er = a[0] + b[0], ei = a[1] - b[1], dr = a[0] - b[0], di = a[1] + b[1];
  const V tr = w[0] * di + w[1] * dr, ti = w[1] * di - w[0] * dr;
  a[0] = factor * (er + tr);
  a[1] = factor * (ei + ti);
  b[0] = factor * (er - tr);
  b[1] = factor * (ti - ei);
}

template <class V>
GZ_HD void tangle(V* a, V* b, const float* w, float factor) {
  const V er = a[0] + b[0], ei = a[1] - b[1], dr = a[0] - b[0], di = a[1] + b[1];
  const V tr = w[0] * dr + w[1] * di, ti = w[0] * di - w[1] * dr;
  a[0] = factor * (er - ti);
  a[1] = factor * (ei + tr);
  b[0] = factor * (er + ti);
  b[1] = factor * (tr - ei);
}

// Coefficient 0, (Z.re + Z.im, Z.re - Z.im) / sqrt(2 M), is its own inverse, and so is coefficient M / 2.
template <class V>
GZ_HD void tangle_first(V* a, float factor) {
  const V re = a[0], im = a[1];
  a[0] = factor * (re + im);
  a[1] = factor * (re - im);
}
template <class V>
GZ_HD void tangle_middle(V* a, float factor) {
  a[0] = 2.0f * factor * a[0];
  a[1] = -2.0f * factor * a[1];
}

// From Fourier coefficient 0 < k < N / 2 of the elements 0, 2, 4, ..., 5, 3, 1 to coefficients k and N - k of the DCT-II
// (Makhoul, A Fast Cosine Transform in One and Two Dimensions, 1980). A reflection: its own inverse. `w` is
// exp(-2 pi i k / (4 N)).
template <class V>
GZ_HD void reflect(V* a, const float* w) {
  const V re = a[0], im = a[1];
  a[0] = w[0] * re - w[1] * im;
  a[1] = -(w[1] * re) - w[0] * im;
}

// --- where elements and coefficients of a row are kept while it is transformed

// j with its log2(count) bits in the opposite order, for 0 <= j < count.
GZ_HD constexpr int bit_reversed(int j, int count) {
  int reversed = 0;
  for (; count > 1; count /= 2, j /= 2) reversed = 2 * reversed + j % 2;
  return reversed;
}

// Where element e of a row goes before the complex numbers are bit-reversed: a long DCT takes 0, 2, 4, ..., 5, 3, 1.
GZ_HD int element_order(const TransformLayout& t, int e) {
  return !t.long_dct() ? e : e % 2 ? t.length - 1 - e / 2 : e / 2;
}

// The slot of element e of a row before the forward transform, and after the inverse one.
GZ_HD int element_slot(const TransformLayout& t, int e) {
  const int i = element_order(t, e);
  return t.uses_fourier() ? 2 * bit_reversed(i / 2, t.length / 2) + i % 2 : i;
}

// The coefficient in slot s after the forward transform, and before the inverse one.
GZ_HD int slot_coefficient(const TransformLayout& t, int s) {
  if (!t.long_dct()) return s;
  if (s < 2) return s * (t.length / 2);
  return s % 2 ? t.length - s / 2 : s / 2;
}

// The slot of coefficient p: the inverse of slot_coefficient.
GZ_HD int coefficient_slot(const TransformLayout& t, int p) {
  if (!t.long_dct()) return p;
  if (p % (t.length / 2) == 0) return p ? 1 : 0;
  return 2 * p < t.length ? 2 * p : 2 * (t.length - p) + 1;
}

}  // namespace gradzip
