// Tiles of every transform, in shared memory.
#pragma once

#include "common/transform.h"
#include "cuda/block/bitmap_tiles.cuh"
#include "cuda/block/quads.cuh"
#include "cuda/block/ranked_words.cuh"

namespace gradzip::cuda {

constexpr int kTransformBlock = 512;
constexpr int kElementsPerThread = int(kTransformTile) / kTransformBlock;

// exp(-2 pi i j / 1024), for j in bit-reversed order. So the factor of a butterfly depends only on the number of
// butterflies' blocks before its own, whatever the length, and coefficient k finds its factor at its own place.
struct ReversedTwiddles {
  float of[kMostFourier / 2][2] = {};
  constexpr ReversedTwiddles() {
    constexpr Twiddles ordered;
    for (int j = 0; j < kMostFourier / 2; ++j)
      for (int part = 0; part < 2; ++part) of[bit_reversed(j, kMostFourier / 2)][part] = ordered.of[j][part];
  }
};
__constant__ const ReversedTwiddles kTwiddles;

// --- a tile in shared memory
// Plane p has element p of every row (a long DCT: in `element_order`), then coefficients in the order of `planes`.
// Neighbouring threads take neighbouring rows, hence neighbouring banks. The pitch of planes spreads the elements of a
// row, which neighbouring threads load and store, over the banks: at most two threads of a warp share one. (In transforms
// of 512 and 1024 elements, whose tiles have 16 and 8 rows, up to four.)

constexpr int kTileRoom = int(kTransformTile) + kMostFourier;  // for the pitch: at most 62 floats or one per plane

struct Tile {
  static constexpr int kThreads = kTransformBlock, kBlocks = 2, kVotes = int(kTransformTile) / 32;
  static constexpr int kCopies = 1, kWindow = 1536;  // what fits 48 KiB

  const TransformLayout& t;
  int &row_bits, &pitch;  // in shared memory, to save registers
  float* z;
  uint16_t* planes;  // where the plane of each coefficient begins

  // Of the tile that `open` has chosen: the elements after the last whole row are another row, which is not transformed.
  int count, whole, groups;

  struct Shape {
    int row_bits, pitch;  // log2 of the rows; between planes
  };
  GZ_DEVICE static Shape& shape() {
    __shared__ Shape one;
    return one;
  }

  // All threads of a block make one.
  GZ_DEVICE explicit Tile(const TransformLayout& layout) : t(layout), row_bits(shape().row_bits), pitch(shape().pitch) {
    __shared__ float room[kTileRoom];
    __shared__ uint16_t at[kMostFourier];
    const int length = t.length, rows = int(t.tile) / length;
    const int spread = rows + (length < kLanes ? (length + kLanes - 1) / length : 1);
    if (threadIdx.x == 0) row_bits = 31 - __clz(rows), pitch = spread;
    z = room;
    planes = at;
    for (int p = int(threadIdx.x); p < length; p += kTransformBlock) {
      const int slot = coefficient_slot(t, p);
      at[p] = uint16_t(spread * (t.uses_fourier() ? 2 * bit_reversed(slot / 2, length / 2) + slot % 2 : slot));
    }
  }

  GZ_DEVICE void open(int64_t tile) {
    count = int(t.count(tile));
    whole = count / t.length;
    groups = int(t.groups_of(count));
    __syncthreads();  // nobody reads the last tile
  }

  GZ_DEVICE int group() const { return t.group; }
  GZ_DEVICE int tile_groups() const { return int(t.tile_groups()); }
  GZ_DEVICE float* window() const {
    __shared__ float room[kWindow];
    return room;
  }

  // f(j, i, place of element i) for the elements of this thread, j < kElementsPerThread; a last pair is whole.
  template <class F>
  GZ_DEVICE void for_each_element(F f) const {
    const int length = t.length, rows_on = kTransformBlock / length, elements_on = kTransformBlock % length;
    int row = int(threadIdx.x) / length, e = int(threadIdx.x) % length;
#pragma unroll
    for (int j = 0; j < kElementsPerThread; ++j) {
      const int i = j * kTransformBlock + int(threadIdx.x);
      if (i < groups * t.group) f(j, i, (row < whole ? element_order(t, e) : e) * pitch + row);
      row += rows_on;
      e += elements_on;
      if (e >= length) e -= length, ++row;
    }
  }

  // f(i, place of the real part, place of the imaginary part) for the groups i of this thread, in the order of
  // coefficients. Whole warps call f, with i >= groups too, and have 32 neighbours.
  template <class F>
  GZ_DEVICE void for_each_place(F f) const {
    const int group = t.group, in_rows = whole * (t.length / group);
    const int planes_on = whole ? kTransformBlock / whole : 0, rows_on = whole ? kTransformBlock % whole : 0;
    int p = whole ? int(threadIdx.x) / whole : 0, row = whole ? int(threadIdx.x) % whole : 0;
    for (int i = int(threadIdx.x); i - lane() < groups; i += kTransformBlock) {
      int re = group * (i - in_rows) * pitch + whole, im = re + (group - 1) * pitch;
      if (i < in_rows) {
        re = planes[group * p] + row;
        im = planes[group * p + group - 1] + row;
      }
      f(i, re, im);  // in one place: it may have warp collectives
      p += planes_on;
      row += rows_on;
      if (row >= whole) row -= whole, ++p;
    }
  }

  template <class F>
  GZ_DEVICE void for_each_group(F f) const {
    for_each_place([&](int i, int re, int im) {
      if (i < groups) f(i / 32, z[re], z[im]);
    });
  }

  // The votes are the words of the bitmap.
  template <class F>
  GZ_DEVICE void vote(RankedWord* votes, F f) const {
    for_each_place([&](int i, int re, int im) {
      const unsigned word = __ballot_sync(kAllLanes, i < groups && f(z[re], z[im]));
      if (lane() == 0) votes[i / 32].word = word;
    });
    for (int v = (groups + 31) / 32 + int(threadIdx.x); v < kVotes; v += kThreads) votes[v].word = 0;
    __syncthreads();
  }
  GZ_DEVICE uint32_t bitmap_word(const RankedWord* votes, int w) const { return votes[w].word; }
  GZ_DEVICE uint32_t vote_of(const uint8_t* bitmap, int v) const { return load_word(bitmap, v, groups); }

  GZ_DEVICE void load(const void* x, int64_t dtype, int64_t first) const {
    float value[kElementsPerThread];  // all loads in flight
    typed_in(x, dtype, [&](auto* from) {
#pragma unroll
      for (int j = 0; j < kElementsPerThread; ++j) {
        const int i = j * kTransformBlock + int(threadIdx.x);
        value[j] = i < count ? load1(from + first + i) : 0.0f;
      }
    });
    for_each_element([&](int j, int, int place) { z[place] = value[j]; });
  }

  GZ_DEVICE void store(float* to, bool add) const {
    for_each_element([&](int, int i, int place) {
      if (i < count) to[i] = add ? to[i] + z[place] : z[place];
    });
  }

  GZ_DEVICE void clear() const {
    for (int j = int(threadIdx.x); j < t.length * pitch; j += kThreads) z[j] = 0.0f;
  }

  // f(task, row) for tasks [0, tasks) of each row: neighbouring threads have the same task.
  template <class F>
  GZ_DEVICE void for_each_task(int tasks, F f) const {
    for (int i = int(threadIdx.x); i < tasks << row_bits; i += kTransformBlock)
      if (const int row = i & ((1 << row_bits) - 1); row < whole) f(i >> row_bits, row);
  }

  // --- the transforms; between passes, each followed by a barrier, a thread has everything in registers

  // Stages of a Fourier transform of bit-reversed numbers, in natural order here: kStages of them, on numbers that are
  // 2^step_bits apart.
  template <int kStages, bool kInverse>
  GZ_DEVICE void fourier_pass(int step_bits) const {
    constexpr int kMany = 1 << kStages;
    const int apart = 2 * pitch << step_bits;
    for_each_task(t.length / 2 / kMany, [&](int task, int row) {
      const int block = task >> step_bits, low = task & ((1 << step_bits) - 1);
      float* at = z + 2 * pitch * ((block << (step_bits + kStages)) + low) + row;
      float v[kMany][2];
#pragma unroll
      for (int i = 0; i < kMany; ++i) v[i][0] = at[i * apart], v[i][1] = at[i * apart + pitch];
#pragma unroll
      for (int turn = 0; turn < kStages; ++turn) {
        const int stage = kInverse ? kStages - 1 - turn : turn, distance = kMany >> (stage + 1);
#pragma unroll
        for (int i = 0; i < kMany; ++i) {
          if (i & distance) continue;
          const float* w = kTwiddles.of[(block << stage) + i / (2 * distance)];
          if (kInverse)
            inverse_butterfly(v[i], v[i + distance], w);
          else
            butterfly(v[i], v[i + distance], w);
        }
      }
#pragma unroll
      for (int i = 0; i < kMany; ++i) at[i * apart] = v[i][0], at[i * apart + pitch] = v[i][1];
    });
    __syncthreads();
  }

  // From a complex transform to one of real numbers, or back; the reflections of a long DCT. In bit-reversed order, the
  // numbers with the same highest bit set are the negatives of each other, and even ones are below the middle.
  template <bool kInverse>
  GZ_DEVICE void untangle_pass() const {
    const float unit = unit_factor(t.length), half = half_factor(t.length);
    const bool long_dct = t.long_dct();
    for_each_task(t.length / 4, [&](int task, int row) {
      const int k = 2 * task, mate = k ? 3 * (1 << (31 - __clz(k))) - 1 - k : 1;
      float *at_a = z + 2 * pitch * k + row, *at_b = z + 2 * pitch * mate + row;
      float a[2] = {at_a[0], at_a[pitch]}, b[2] = {at_b[0], at_b[pitch]};
      const auto reflect_both = [&] {
        if (k) reflect(a, kTwiddles.of[4 * k]);
        reflect(b, kTwiddles.of[4 * mate]);
      };
      if (kInverse && long_dct) reflect_both();
      if (k == 0) {
        tangle_first(a, unit);
        tangle_middle(b, half);
      } else if (kInverse) {
        tangle(a, b, kTwiddles.of[k], half);
      } else {
        untangle(a, b, kTwiddles.of[k], half);
      }
      if (!kInverse && long_dct) reflect_both();
      at_a[0] = a[0], at_a[pitch] = a[1];
      at_b[0] = b[0], at_b[pitch] = b[1];
    });
    __syncthreads();
  }

  template <bool kInverse>
  GZ_DEVICE void separable() const {
    int stride = kInverse ? 1 : t.length;
#pragma unroll 1
    for (int turn = 0; turn < 3; ++turn) {
      const int i = kInverse ? 2 - turn : turn;
      const int axis = i == 0 ? t.axes[0] : i == 1 ? t.axes[1] : t.axes[2];  // no array in local memory
      if (axis == 1) continue;
      if (!kInverse) stride /= axis;
      for_each_task(t.length / axis, [&](int line, int row) {
        const int outer = line / stride, inner = line - outer * stride;
        dct_axis(z + pitch * (outer * axis * stride + inner) + row, stride * pitch, axis, kInverse);
      });
      if (kInverse) stride *= axis;
      __syncthreads();
    }
  }

  // From the elements of `load` to coefficients.
  GZ_DEVICE void forward() const {
    __syncthreads();
    if (t.uses_fourier()) {
      int stages = 30 - __clz(t.length);
      for (; stages >= 3; stages -= 3) fourier_pass<3, false>(stages - 3);
      if (stages == 2) fourier_pass<2, false>(0);
      if (stages == 1) fourier_pass<1, false>(0);
      untangle_pass<false>();
    } else if (t.kind == TransformKind::dct) {
      separable<false>();
    }
  }

  // From coefficients to elements.
  GZ_DEVICE void inverse() const {
    __syncthreads();
    if (t.uses_fourier()) {
      const int stages = 30 - __clz(t.length), first = stages % 3;
      untangle_pass<true>();
      if (first == 2) fourier_pass<2, true>(0);
      if (first == 1) fourier_pass<1, true>(0);
      for (int step_bits = first; step_bits < stages; step_bits += 3) fourier_pass<3, true>(step_bits);
    } else if (t.kind == TransformKind::dct) {
      separable<true>();
    }
  }
};

}  // namespace gradzip::cuda
