// A tile is transformed 16 rows at a time, a row to a lane of one register or several, so that its coefficients stay in
// the L1 cache.
#include "cpu/transform_tile.h"

#include <cstring>

#include "cpu/half.h"
#include "cpu/vectors.h"

namespace gradzip::cpu {
namespace {

constexpr int kRows = 16;  // transformed together: they fill cache lines of coefficients
constexpr int kUsual = 64;  // length of Fourier transforms that the compiler knows: FFTRange's default
constexpr Twiddles kTwiddles;

// Memory to prefetch, a few lines at a time between other work: a processor has few requests under way at a time.
struct Ahead {
  const char *at, *end;

  template <class T>
  Ahead(const T* first, const T* last)
      : at(reinterpret_cast<const char*>(first)), end(reinterpret_cast<const char*>(last)) {}
  GZ_INLINE void prefetch(int lines) {
    for (; lines > 0 && at < end; --lines, at += 64) __builtin_prefetch(at, 0, 2);
  }
};

// --- rows to lanes and back: of each kLanes rows in turn, slots[slot[e]] has element e

struct Rows {
  int count, length;  // count <= kRows; the other lanes are 0
  const uint16_t* slot;

  // The place of element e of the rows from row r on.
  template <int kLanes>
  GZ_INLINE int64_t place(int r, int e) const {
    return (r / kLanes * length + slot[e]) * kLanes + r % kLanes;
  }
};

template <int kLanes>
GZ_INLINE void load_each(const float* x, const Rows& rows, Ahead& ahead, float* slots) {
  if (rows.count < kRows) std::memset(slots, 0, size_t(rows.length) * kRows * sizeof(float));
  for (int e = 0; e < rows.length; ++e) {
    for (int r = 0; r < rows.count; ++r) slots[rows.place<kLanes>(r, e)] = x[r * rows.length + e];
    ahead.prefetch(1);
  }
}
template <int kLanes>
GZ_INLINE void store_each(const float* slots, const Rows& rows, float* x) {
  for (int r = 0; r < rows.count; ++r)
    for (int e = 0; e < rows.length; ++e) x[r * rows.length + e] = slots[rows.place<kLanes>(r, e)];
}
void load_rows_scalar(const float* x, const Rows& rows, Ahead& ahead, float* slots) {
  load_each<4>(x, rows, ahead, slots);
}
void store_rows_scalar(const float* slots, const Rows& rows, float* x) { store_each<4>(slots, rows, x); }

// 8 x 8 floats.
GZ_AVX2 GZ_INLINE void transpose(__m256 (&v)[8]) {
  __m256 t[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(v[i], v[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      v[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0x44);
      v[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0xee);
    }
  for (int j = 0; j < 4; ++j) {
    t[j] = _mm256_permute2f128_ps(v[j], v[j + 4], 0x20);
    t[j + 4] = _mm256_permute2f128_ps(v[j], v[j + 4], 0x31);
  }
  for (int j = 0; j < 8; ++j) v[j] = t[j];
}

GZ_AVX2 void load_rows_avx2(const float* x, const Rows& rows, Ahead& ahead, float* slots) {
  if (rows.count < kRows) return load_each<8>(x, rows, ahead, slots);
  for (int first = 0; first < kRows; first += 8) {
    const float* from = x + first * rows.length;
    int e = 0;
    for (; e + 8 <= rows.length; e += 8, ahead.prefetch(1)) {
      __m256 v[8];
      for (int r = 0; r < 8; ++r) v[r] = _mm256_loadu_ps(from + r * rows.length + e);
      transpose(v);
      for (int i = 0; i < 8; ++i) _mm256_storeu_ps(slots + rows.place<8>(first, e + i), v[i]);
    }
    for (; e < rows.length; ++e, ahead.prefetch(1)) {
      const auto of = [&](int r) { return from[r * rows.length + e]; };
      _mm256_storeu_ps(slots + rows.place<8>(first, e),
                       _mm256_setr_ps(of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7)));
    }
  }
}
GZ_AVX2 void store_rows_avx2(const float* slots, const Rows& rows, float* x) {
  if (rows.count < kRows) return store_each<8>(slots, rows, x);
  for (int first = 0; first < kRows; first += 8) {
    float* to = x + first * rows.length;
    int e = 0;
    for (; e + 8 <= rows.length; e += 8) {
      __m256 v[8];
      for (int i = 0; i < 8; ++i) v[i] = _mm256_loadu_ps(slots + rows.place<8>(first, e + i));
      transpose(v);
      for (int r = 0; r < 8; ++r) _mm256_storeu_ps(to + r * rows.length + e, v[r]);
    }
    for (; e < rows.length; ++e)
      for (int r = 0; r < 8; ++r) to[r * rows.length + e] = slots[rows.place<8>(first, e) + r];
  }
}

// 16 x 16 floats.
GZ_AVX512 GZ_INLINE void transpose(__m512 (&v)[16]) {
  __m512 t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      const __m512d a = _mm512_castps_pd(t[i + j]), b = _mm512_castps_pd(t[i + j + 2]);
      v[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      v[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
  for (int j = 0; j < 4; ++j)
    for (int i = 0; i < 16; i += 8) {
      t[i + j] = _mm512_shuffle_f32x4(v[i + j], v[i + j + 4], 0x88);
      t[i + j + 4] = _mm512_shuffle_f32x4(v[i + j], v[i + j + 4], 0xdd);
    }
  for (int j = 0; j < 4; ++j) {
    v[j] = _mm512_shuffle_f32x4(t[j], t[j + 8], 0x88);
    v[j + 8] = _mm512_shuffle_f32x4(t[j], t[j + 8], 0xdd);
    v[j + 4] = _mm512_shuffle_f32x4(t[j + 4], t[j + 12], 0x88);
    v[j + 12] = _mm512_shuffle_f32x4(t[j + 4], t[j + 12], 0xdd);
  }
}

// Permutations that split 48 floats into every third one, and back: output j takes lane i from the first two inputs by
// `first`, and then from that and the third input by `second`.
struct Thirds {
  alignas(64) int split_first[3][16], split_second[3][16], join_first[3][16], join_second[3][16];
  constexpr Thirds() : split_first{}, split_second{}, join_first{}, join_second{} {
    for (int j = 0; j < 3; ++j)
      for (int i = 0; i < 16; ++i) {
        const int from = 3 * i + j, to = 16 * j + i;
        split_first[j][i] = from < 32 ? from : 0;
        split_second[j][i] = from < 32 ? i : from - 16;
        join_first[j][i] = to % 3 < 2 ? 16 * (to % 3) + to / 3 : 0;
        join_second[j][i] = to % 3 < 2 ? i : 16 + to / 3;
      }
  }
};
constexpr Thirds kThirds;

GZ_AVX512 GZ_INLINE void permute_thirds(__m512& a, __m512& b, __m512& c, const int (&first)[3][16],
                                        const int (&second)[3][16]) {
  __m512 out[3];
  for (int j = 0; j < 3; ++j)
    out[j] = _mm512_permutex2var_ps(_mm512_permutex2var_ps(a, _mm512_load_si512(first[j]), b),
                                    _mm512_load_si512(second[j]), c);
  a = out[0], b = out[1], c = out[2];
}

GZ_AVX512 void load_rows_avx512(const float* x, const Rows& rows, Ahead& ahead, float* slots) {
  const auto place = [&](int e) { return slots + rows.place<kRows>(0, e); };
  if (rows.count == kRows && rows.length == 9) {
    __m512 v[9];
    for (int i = 0; i < 9; ++i) v[i] = _mm512_loadu_ps(x + 16 * i);
    for (int i = 0; i < 9; i += 3) permute_thirds(v[i], v[i + 1], v[i + 2], kThirds.split_first, kThirds.split_second);
    for (int j = 0; j < 3; ++j) permute_thirds(v[j], v[j + 3], v[j + 6], kThirds.split_first, kThirds.split_second);
    for (int e = 0; e < 9; ++e) _mm512_storeu_ps(place(e), v[e]);
    ahead.prefetch(4);
  } else if (rows.count == kRows && rows.length % 16 == 0) {
    for (int e = 0; e < rows.length; e += 16) {
      __m512 v[16];
      for (int r = 0; r < 16; ++r) v[r] = _mm512_loadu_ps(x + r * rows.length + e);
      transpose(v);
      for (int i = 0; i < 16; ++i) _mm512_storeu_ps(place(e + i), v[i]);
      ahead.prefetch(4);
    }
  } else {
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i at = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(rows.length));
    const auto mask = __mmask16((1u << rows.count) - 1);
    for (int e = 0; e < rows.length; ++e)
      _mm512_storeu_ps(place(e), _mm512_mask_i32gather_ps(_mm512_setzero_ps(), mask, at, x + e, 4));
  }
}

GZ_AVX512 void store_rows_avx512(const float* slots, const Rows& rows, float* x) {
  const auto place = [&](int e) { return slots + rows.place<kRows>(0, e); };
  if (rows.count == kRows && rows.length == 9) {
    __m512 v[9];
    for (int e = 0; e < 9; ++e) v[e] = _mm512_loadu_ps(place(e));
    for (int j = 0; j < 3; ++j) permute_thirds(v[j], v[j + 3], v[j + 6], kThirds.join_first, kThirds.join_second);
    for (int i = 0; i < 9; i += 3) permute_thirds(v[i], v[i + 1], v[i + 2], kThirds.join_first, kThirds.join_second);
    for (int i = 0; i < 9; ++i) _mm512_storeu_ps(x + 16 * i, v[i]);
  } else if (rows.count == kRows && rows.length % 16 == 0) {
    for (int e = 0; e < rows.length; e += 16) {
      __m512 v[16];
      for (int i = 0; i < 16; ++i) v[i] = _mm512_loadu_ps(place(e + i));
      transpose(v);
      for (int r = 0; r < 16; ++r) _mm512_storeu_ps(x + r * rows.length + e, v[r]);
    }
  } else {
    store_each<kRows>(slots, rows, x);
  }
}

GZ_SIMD_SELECT(void, load_rows, (const float* x, const Rows& rows, Ahead& ahead, float* slots), (x, rows, ahead, slots))
GZ_SIMD_SELECT(void, store_rows, (const float* slots, const Rows& rows, float* x), (slots, rows, x))

// --- the transforms of the rows in a register, in place
//
// Of a vector of 64 bytes, g++ would make several registers for AVX2, but copy it by 16 bytes, and wait for these to be
// stored before they are read as registers.

// The stages for which 2^stages complex numbers stay in registers, of which AVX-512 has 32 and the others 16.
template <int kBytes>
constexpr int register_stages() {
  return kBytes == 64 ? 3 : 2;
}

// 2^kStages elements at a time, so that they stay in registers for the stages half, 2 half, ..., 2^(kStages - 1) half.
template <int kStages, bool kInverse, bool kFirst, class Floats>
GZ_INLINE void fourier_group(Floats* z, int half, int j) {
  constexpr int kMany = 1 << kStages;
  Floats v[kMany][2];
  for (int i = 0; i < kMany; ++i) v[i][0] = z[2 * i * half], v[i][1] = z[2 * i * half + 1];
  for (int step = 0; step < kStages; ++step) {
    const int stage = kInverse ? kStages - 1 - step : step, apart = 1 << stage;
    for (int i = 0; i < kMany; ++i) {
      if (i & apart) continue;
      Floats *a = v[i], *b = v[i + apart];
      const float* w = twiddle(kTwiddles.of, i % apart * half + j, half << stage);
      if (kFirst && i % apart == 0)
        unit_butterfly(a, b);
      else if (kFirst && i % apart * 2 == apart)
        kInverse ? inverse_quarter_butterfly(a, b) : quarter_butterfly(a, b);
      else
        kInverse ? inverse_butterfly(a, b, w) : butterfly(a, b, w);
    }
  }
  for (int i = 0; i < kMany; ++i) z[2 * i * half] = v[i][0], z[2 * i * half + 1] = v[i][1];
}

template <int kStages, bool kInverse, class Floats>
GZ_INLINE void fourier_pass(Floats* z, int numbers, int half, Ahead& ahead) {
  const int step = half << kStages;
  for (int first = 0; first < numbers; first += step, ahead.prefetch(2))
    fourier_group<kStages, kInverse, true>(z + 2 * first, half, 0);
  for (int j = 1; j < half; ++j)
    for (int first = j; first < numbers; first += step) fourier_group<kStages, kInverse, false>(z + 2 * first, half, j);
}

// All stages, of 2^kStages elements at a time and last, for what is left, of fewer; the inverse in the opposite order.
template <int kStages, bool kInverse, class Floats>
GZ_INLINE void fourier_passes(Floats* z, int numbers, Ahead& ahead) {
  int half = 1;
  if (kInverse) {
#pragma GCC unroll 4
    while (half << kStages <= numbers) half <<= kStages;
  } else {
#pragma GCC unroll 4
    for (; half << kStages <= numbers; half <<= kStages) fourier_pass<kStages, false>(z, numbers, half, ahead);
  }
  if (kStages == 3 && 4 * half == numbers) fourier_pass<2, kInverse>(z, numbers, half, ahead);
  if (2 * half == numbers) fourier_pass<1, kInverse>(z, numbers, half, ahead);
  if (kInverse) {
#pragma GCC unroll 4
    for (half >>= kStages; half >= 1; half >>= kStages) fourier_pass<kStages, true>(z, numbers, half, ahead);
  }
}

template <class Floats>
GZ_INLINE void untangle_all(Floats* z, int length, bool inverse) {
  const int numbers = length / 2;
  const float factor = half_factor(length);
  tangle_first(z, unit_factor(length));
  tangle_middle(z + numbers, factor);
  for (int k = 1; k < numbers / 2; ++k) {
    const float* w = twiddle(kTwiddles.of, k, numbers);
    if (inverse)
      tangle(z + 2 * k, z + 2 * (numbers - k), w, factor);
    else
      untangle(z + 2 * k, z + 2 * (numbers - k), w, factor);
  }
}

// The real transform of `length` elements, or its inverse. Inlined, so that a constant length unrolls its loops.
template <int kStages, bool kInverse, class Floats>
GZ_INLINE void fourier_row(Floats* z, int length, Ahead& ahead) {
  if (kInverse) untangle_all(z, length, true);
  fourier_passes<kStages, kInverse>(z, length / 2, ahead);
  if (!kInverse) untangle_all(z, length, false);
}

template <class Floats>
GZ_INLINE void reflect_all(Floats* z, int length) {
  for (int k = 1; k < length / 2; ++k) reflect(z + 2 * k, twiddle(kTwiddles.of, k, 2 * length));
}

// The separable DCT, with lengths that the compiler knows: the elements stay in registers.
template <int kLength, bool kInverse, class Floats>
GZ_INLINE void square_kernel(Floats* z) {
  Floats v[kLength * kLength];
  for (int i = 0; i < kLength * kLength; ++i) v[i] = z[i];
  for (int axis = 0; axis < 2; ++axis) {
    const bool down = (axis == 0) != kInverse;
    for (int i = 0; i < kLength; ++i) {
      Floats* line = down ? v + i : v + i * kLength;
      const int stride = down ? kLength : 1;
      if (kInverse)
        dct_inverse<kLength>(line, stride);
      else
        dct_forward<kLength>(line, stride);
    }
  }
  for (int i = 0; i < kLength * kLength; ++i) z[i] = v[i];
}

template <bool kInverse, class Floats>
GZ_INLINE void separable(const Transform& t, Floats* z) {
  if (t.length == 9 && t.axes[0] == 3 && t.axes[1] == 3) return square_kernel<3, kInverse>(z);
  int stride = kInverse ? 1 : t.length;
  for (int i = 0; i < 3; ++i) {
    const int length = t.axes[kInverse ? 2 - i : i];
    if (!kInverse) stride /= length;
    if (length > 1)
      for (int outer = 0; outer < t.length; outer += stride * length)
        for (int inner = 0; inner < stride; ++inner) dct_axis(z + outer + inner, stride, length, kInverse);
    if (kInverse) stride *= length;
  }
}

// --- tiles

// Where the rows of a tile have their coefficients: `rows` whole rows, `groups` groups in all.
struct Planes {
  int64_t rows, groups;
  int32_t of[kMostLength];  // the plane of the coefficient in a slot

  Planes(const Transform& t, int64_t count) : rows(count / t.length), groups(t.groups_of(count)) {
    for (int s = 0; s < t.length; ++s) {
      const int p = t.coefficient[s];
      of[s] = int32_t(t.group == 1 ? p * rows : p / 2 * rows + p % 2 * groups);
    }
  }

  // The place of element i, which is after the last whole row.
  int64_t after_rows(const Transform& t, int64_t i) const { return t.group == 1 ? i : i / 2 + i % 2 * groups; }
};

// Transforms `count` rows of a tile, from the slots to their planes; `out` is the place of the first row in plane 0.
template <int kBytes>
GZ_INLINE void forward_rows_body(const Transform& t, float* slots, const Planes& planes, int count, Ahead& ahead,
                                 float* out) {
  constexpr int kLanes = kBytes / 4, kStages = register_stages<kBytes>();
  auto* const rows = reinterpret_cast<Vector<float, kBytes>*>(slots);
  for (auto* z = rows; z < rows + kRows / kLanes * t.length; z += t.length) {
    if (t.uses_fourier()) {
      if (t.length == kUsual)
        fourier_row<kStages, false>(z, kUsual, ahead);
      else
        fourier_row<kStages, false>(z, t.length, ahead);
      if (t.long_dct()) reflect_all(z, t.length);
    } else if (t.kind == TransformKind::dct) {
      separable<false>(t, z);
    }
  }
  ahead.prefetch(t.length);
  for (int s = 0; count == kRows && s < t.length; ++s)
    for (int r = 0; r < kRows; r += kLanes) store<kBytes>(out + planes.of[s] + r, rows[r / kLanes * t.length + s]);
  for (int s = 0; count < kRows && s < t.length; ++s)
    for (int r = 0; r < count; r += kLanes) {
      const auto& from = rows[r / kLanes * t.length + s];
      std::memcpy(out + planes.of[s] + r, &from, size_t(std::min(count - r, kLanes)) * sizeof(float));
    }
}
GZ_SIMD_DISPATCH_BYTES(void, forward_rows,
                       (const Transform& t, float* slots, const Planes& planes, int count, Ahead& ahead, float* out),
                       (t, slots, planes, count, ahead, out))

// The inverse, from their planes to the slots.
template <int kBytes>
GZ_INLINE void inverse_rows_body(const Transform& t, const float* in, const Planes& planes, int count, float* slots) {
  constexpr int kLanes = kBytes / 4, kStages = register_stages<kBytes>();
  auto* const rows = reinterpret_cast<Vector<float, kBytes>*>(slots);
  for (int s = 0; count == kRows && s < t.length; ++s)
    for (int r = 0; r < kRows; r += kLanes) rows[r / kLanes * t.length + s] = load<kBytes>(in + planes.of[s] + r);
  if (count < kRows) std::memset(slots, 0, size_t(t.length) * kRows * sizeof(float));
  for (int s = 0; count < kRows && s < t.length; ++s)
    for (int r = 0; r < count; r += kLanes) {
      auto& to = rows[r / kLanes * t.length + s];
      std::memcpy(&to, in + planes.of[s] + r, size_t(std::min(count - r, kLanes)) * sizeof(float));
    }
  const float* nothing = nullptr;
  Ahead ahead(nothing, nothing);
  for (auto* z = rows; z < rows + kRows / kLanes * t.length; z += t.length) {
    if (t.uses_fourier()) {
      if (t.long_dct()) reflect_all(z, t.length);
      if (t.length == kUsual)
        fourier_row<kStages, true>(z, kUsual, ahead);
      else
        fourier_row<kStages, true>(z, t.length, ahead);
    } else if (t.kind == TransformKind::dct) {
      separable<true>(t, z);
    }
  }
}
GZ_SIMD_DISPATCH_BYTES(void, inverse_rows,
                       (const Transform& t, const float* in, const Planes& planes, int count, float* slots),
                       (t, in, planes, count, slots))

}  // namespace

template <class T>
void forward_tile(const Transform& t, const T* x, int64_t count, float* coefficients) {
  if (t.length == 1) {
    const float* values = as_floats(x, count, coefficients);
    if (values != coefficients) std::memcpy(coefficients, values, size_t(count) * sizeof(float));
    return;
  }
  const Planes planes(t, count);
  alignas(64) float slots[kMostLength * kRows], room[sizeof(T) == sizeof(float) ? 1 : kMostLength * kRows];
  for (int64_t r = 0; r < planes.rows; r += kRows) {
    const Rows some{int(std::min<int64_t>(planes.rows - r, kRows)), t.length, t.slot};
    const T *own = x + r * t.length, *next = own + some.count * t.length;
    Ahead ahead(own + kTransformAhead, next + kTransformAhead);
    load_rows(as_floats(own, next - own, room), some, ahead, slots);
    forward_rows(t, slots, planes, some.count, ahead, coefficients + r);
  }
  const int64_t whole = planes.rows * t.length;
  const float* rest = as_floats(x + whole, count - whole, room);
  for (int64_t i = whole; i < planes.groups * t.group; ++i)
    coefficients[planes.after_rows(t, i)] = i < count ? rest[i - whole] : 0.0f;
}
template void forward_tile(const Transform&, const float*, int64_t, float*);
template void forward_tile(const Transform&, const BFloat16*, int64_t, float*);
template void forward_tile(const Transform&, const Float16*, int64_t, float*);

void inverse_tile(const Transform& t, const float* coefficients, int64_t count, float* x) {
  if (t.length == 1) {
    std::memcpy(x, coefficients, size_t(count) * sizeof(float));
    return;
  }
  const Planes planes(t, count);
  alignas(64) float slots[kMostLength * kRows];
  for (int64_t r = 0; r < planes.rows; r += kRows) {
    const Rows some{int(std::min<int64_t>(planes.rows - r, kRows)), t.length, t.slot};
    inverse_rows(t, coefficients + r, planes, some.count, slots);
    store_rows(slots, some, x + r * t.length);
  }
  for (int64_t i = planes.rows * t.length; i < count; ++i) x[i] = coefficients[planes.after_rows(t, i)];
}

}  // namespace gradzip::cpu
