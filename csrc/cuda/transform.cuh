// Transforms of short blocks, fused with the selection of the largest coefficients and with decoding. A block transforms
// a tile in shared memory: coefficients that are not wanted never leave it.
//
// Selection reads x twice. The first pass finds the leading bits of the k-th largest magnitude (cuda/select.cuh). The
// second one writes the candidates, coefficients that have at least these bits, and the passes after it read only those.
#pragma once

#include "common/transform.h"
#include "cuda/block/bit_stream.cuh"
#include "cuda/block/bitmap_tiles.cuh"
#include "cuda/block/bytes.cuh"
#include "cuda/block/quads.cuh"
#include "cuda/select.cuh"

namespace gradzip::cuda {

constexpr int kTransformBlock = kSelectBlock;
constexpr int kTransformBlocks = 2;  // at least, per multiprocessor
constexpr int kElementsPerThread = int(kTransformTile) / kTransformBlock;
constexpr int kTileWords = int(kTransformTile) / 32;
static_assert(kTileWords <= kTransformBlock, "a thread has a word of a tile's bitmap");

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
  const TransformLayout& t;
  int length, rows, row_bits, pitch;
  float* z;
  uint16_t* planes;  // where the plane of each coefficient begins

  // Of the tile that `open` has chosen: the elements after the last whole row are another row, which is not transformed.
  int count, whole, groups;

  // All threads of a block make one.
  GZ_DEVICE explicit Tile(const TransformLayout& layout) : t(layout) {
    __shared__ float room[kTileRoom];
    __shared__ uint16_t at[kMostFourier];
    length = t.length;
    rows = int(t.tile) / length;
    row_bits = 31 - __clz(rows);
    pitch = rows + (length < kLanes ? (length + kLanes - 1) / length : 1);
    z = room;
    planes = at;
    for (int p = int(threadIdx.x); p < length; p += kTransformBlock) {
      const int slot = coefficient_slot(t, p);
      at[p] = uint16_t(pitch * (t.uses_fourier() ? 2 * bit_reversed(slot / 2, length / 2) + slot % 2 : slot));
    }
  }

  GZ_DEVICE void open(int64_t tile) {
    count = int(t.count(tile));
    whole = count / length;
    groups = int(t.groups_of(count));
  }

  // f(j, i, place of element i) for the elements of this thread, j < kElementsPerThread; a last pair is whole.
  template <class F>
  GZ_DEVICE void for_each_element(F f) const {
    const int rows_on = kTransformBlock / length, elements_on = kTransformBlock % length;
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
  GZ_DEVICE void for_each_group(F f) const {
    const int group = t.group, in_rows = whole * (length / group);
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

  // x has the elements of the tile.
  GZ_DEVICE void load(const float* x) const {
    float value[kElementsPerThread];  // all loads in flight
#pragma unroll
    for (int j = 0; j < kElementsPerThread; ++j) {
      const int i = j * kTransformBlock + int(threadIdx.x);
      value[j] = i < count ? __ldg(x + i) : 0.0f;
    }
    for_each_element([&](int j, int, int place) { z[place] = value[j]; });
  }

  // f(i, element i) for the elements of this thread.
  template <class F>
  GZ_DEVICE void store(F f) const {
    for_each_element([&](int, int i, int place) {
      if (i < count) f(i, z[place]);
    });
  }

  // f(task, row) for tasks [0, tasks) of each row: neighbouring threads have the same task.
  template <class F>
  GZ_DEVICE void for_each_task(int tasks, F f) const {
    for (int i = int(threadIdx.x); i < tasks << row_bits; i += kTransformBlock)
      if ((i & (rows - 1)) < whole) f(i >> row_bits, i & (rows - 1));
  }

  // --- the transforms; between passes, each followed by a barrier, a thread has everything in registers

  // Stages of a Fourier transform of bit-reversed numbers, in natural order here: kStages of them, on numbers that are
  // 2^step_bits apart.
  template <int kStages, bool kInverse>
  GZ_DEVICE void fourier_pass(int step_bits) const {
    constexpr int kMany = 1 << kStages;
    const int apart = 2 * pitch << step_bits;
    for_each_task(length / 2 / kMany, [&](int task, int row) {
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
    const float unit = unit_factor(length), half = half_factor(length);
    const bool long_dct = t.long_dct();
    for_each_task(length / 4, [&](int task, int row) {
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
    int stride = kInverse ? 1 : length;
#pragma unroll 1
    for (int turn = 0; turn < 3; ++turn) {
      const int i = kInverse ? 2 - turn : turn;
      const int axis = i == 0 ? t.axes[0] : i == 1 ? t.axes[1] : t.axes[2];  // no array in local memory
      if (axis == 1) continue;
      if (!kInverse) stride /= axis;
      for_each_task(length / axis, [&](int line, int row) {
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
      int stages = 30 - __clz(length);
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
      const int stages = 30 - __clz(length), first = stages % 3;
      untangle_pass<true>();
      if (first == 2) fourier_pass<2, true>(0);
      if (first == 1) fourier_pass<1, true>(0);
      for (int step_bits = first; step_bits < stages; step_bits += 3) fourier_pass<3, true>(step_bits);
    } else if (t.kind == TransformKind::dct) {
      separable<true>();
    }
  }
};

__global__ void __launch_bounds__(kTransformBlock, kTransformBlocks)
    transform_kernel(TransformLayout t, const float* x, float* coefficients) {
  Tile tile(t);
  for (int64_t i = blockIdx.x; i < t.tiles; i += gridDim.x) {
    tile.open(i);
    tile.load(x + t.begin(i));
    tile.forward();
    float* to = coefficients + t.begin(i);
    tile.for_each_group([&](int g, int re, int im) {
      if (g >= tile.groups) return;
      to[g] = tile.z[re];
      if (t.group == 2) to[tile.groups + g] = tile.z[im];
    });
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kTransformBlock, kTransformBlocks)
    transform_inverse_kernel(TransformLayout t, const float* coefficients, float* x) {
  Tile tile(t);
  __syncthreads();
  for (int64_t i = blockIdx.x; i < t.tiles; i += gridDim.x) {
    tile.open(i);
    const float* from = coefficients + t.begin(i);
    tile.for_each_group([&](int g, int re, int im) {
      if (g >= tile.groups) return;
      tile.z[re] = __ldg(from + g);
      if (t.group == 2) tile.z[im] = __ldg(from + tile.groups + g);
    });
    tile.inverse();
    float* to = x + t.begin(i);
    tile.store([&](int e, float value) { to[e] = value; });
    __syncthreads();
  }
}

// --- selection

// Counts per tile. Offsets are of the groups kept before a tile; `ties` is how many of its ties may be kept.
struct TileSelection {
  uint32_t candidates, above, equal, ties;
  int64_t offset;
};

// Zero at the first pass.
struct TransformSelectState {
  SelectState select;
  uint32_t ticket;
};

struct TransformSelect {
  TransformLayout t;
  int64_t k;
  const float* amax;  // of the data; used for pairs
  TransformSelectState* state;
  Selection* selection;
  TileSelection* tiles;
  uint32_t* marks;  // the bitmap of candidates, in whole words
  float* candidates;  // a tile's begin where the tile does: real parts, and, tile_groups() later, imaginary parts

  GZ_DEVICE float scale() const { return t.group == 2 ? unit_scale(*amax) : 1.0f; }
  // A magnitude to rank a group by: its coefficient, or the energy of its pair.
  GZ_DEVICE uint32_t rank_by(float re, float im, float scale) const {
    if (t.group == 1) return magnitude(re);
    const float a = re * scale, b = im * scale;
    return magnitude(a * a + b * b);
  }
  GZ_DEVICE uint32_t rank_by(const float* list, uint32_t i, float scale) const {
    return rank_by(list[i], t.group == 2 ? list[t.tile_groups() + i] : 0.0f, scale);
  }
  GZ_DEVICE float* list(int64_t tile) const { return candidates + t.begin(tile); }
};

// Thread w has word w of a tile's bitmap: words[w] = word, ranks[w] = the number of bits set in the words before it;
// returns the number in all. Readers need a barrier. Earlier readers are done when all threads call it.
GZ_DEVICE uint32_t rank_words(uint32_t word, uint32_t* words, uint32_t* ranks) {
  __shared__ uint32_t partial[kLanes];
  uint32_t total;
  const uint32_t before = block_scan(uint32_t(__popc(word)), partial, &total);
  if (threadIdx.x < kTileWords) {
    words[threadIdx.x] = word;
    ranks[threadIdx.x] = before;
  }
  return total;
}

template <int kBins>
GZ_DEVICE void clear_counts(uint32_t* counts) {
  for (int bin = int(threadIdx.x); bin < kBins; bin += kTransformBlock) counts[bin] = 0;
}

// The end of pass kPass: all threads have counted.
template <int kPass>
GZ_DEVICE void find_digit(const TransformSelect& s, const uint32_t* counts) {
  using Digit = SelectDigit<kPass>;
  SelectState* state = &s.state->select;
  uint64_t* histogram = state->histogram[kPass];
  __syncthreads();
  for (int bin = int(threadIdx.x); bin < Digit::kBins; bin += kTransformBlock)
    if (counts[bin]) atomic_add(&histogram[bin], counts[bin]);
  if (last_block(&state->ticket[kPass]))
    select_find<Digit::kBins>(s.k, Digit::kShift, kPass == kSelectPasses - 1, histogram, state, s.selection);
}

// Finds the first digit of the k-th largest magnitude.
__global__ void __launch_bounds__(kTransformBlock, kTransformBlocks)
    transform_rank_kernel(TransformSelect s, const float* x) {
  using Digit = SelectDigit<0>;
  __shared__ uint32_t counts[Digit::kBins];
  const float scale = s.scale();
  Tile tile(s.t);
  clear_counts<Digit::kBins>(counts);
  for (int64_t i = blockIdx.x; i < s.t.tiles; i += gridDim.x) {
    tile.open(i);
    tile.load(x + s.t.begin(i));
    tile.forward();
    tile.for_each_group([&](int g, int re, int im) {
      if (g >= tile.groups) return;
      const uint32_t m = s.rank_by(tile.z[re], tile.z[im], scale);
      if (Digit::counts(m, 0)) atomicAdd(&counts[Digit::bin(m)], 1u);
    });
    __syncthreads();
  }
  find_digit<0>(s, counts);
}

// Writes the candidates, those that share the first digit or have a larger one, and finds the second digit. All groups
// are candidates if fewer than k are not zero.
__global__ void __launch_bounds__(kTransformBlock, kTransformBlocks)
    transform_collect_kernel(TransformSelect s, const float* x) {
  using Digit = SelectDigit<1>;
  __shared__ uint32_t counts[Digit::kBins], words[kTileWords], ranks[kTileWords];
  const TransformLayout& t = s.t;
  const float scale = s.scale();
  const uint32_t low = s.state->select.prefix, below = (1u << lane()) - 1;
  const bool done = s.state->select.done;
  Tile tile(t);
  clear_counts<Digit::kBins>(counts);
  for (int64_t i = blockIdx.x; i < t.tiles; i += gridDim.x) {
    tile.open(i);
    tile.load(x + t.begin(i));
    tile.forward();
    tile.for_each_group([&](int g, int re, int im) {
      const bool inside = g < tile.groups;
      const uint32_t m = inside ? s.rank_by(tile.z[re], tile.z[im], scale) : 0;
      const unsigned reach = __ballot_sync(kAllLanes, inside && m >= low);
      if (lane() == 0) words[g / 32] = reach;
      if (!done && Digit::counts(m, low)) atomicAdd(&counts[Digit::bin(m)], 1u);
    });
    __syncthreads();
    const int word = int(threadIdx.x);
    const bool inside = 32 * word < tile.groups;
    const uint32_t reach = inside ? words[word] : 0, total = rank_words(reach, words, ranks);
    if (inside) s.marks[i * t.tile_groups() / 32 + word] = reach;
    if (threadIdx.x == 0) s.tiles[i].candidates = total;
    __syncthreads();
    float* list = s.list(i);
    tile.for_each_group([&](int g, int re, int im) {
      const uint32_t set = g < tile.groups ? words[g / 32] : 0;
      if (!(set >> lane() & 1)) return;
      const uint32_t to = ranks[g / 32] + uint32_t(__popc(set & below));
      list[to] = tile.z[re];
      if (t.group == 2) list[t.tile_groups() + to] = tile.z[im];
    });
    __syncthreads();
  }
  if (!done) find_digit<1>(s, counts);
}

// f(tile) for the tiles of this warp.
template <class F>
GZ_DEVICE void for_each_warp_tile(int64_t tiles, F f) {
  for (int64_t tile = grid_thread() / kLanes; tile < tiles; tile += grid_threads() / kLanes) f(tile);
}

// Finds the last digit, by the candidates.
__global__ void __launch_bounds__(kTransformBlock) transform_refine_kernel(TransformSelect s) {
  using Digit = SelectDigit<2>;
  __shared__ uint32_t counts[Digit::kBins];
  if (s.state->select.done) return;
  const float scale = s.scale();
  const uint32_t prefix = s.state->select.prefix;
  clear_counts<Digit::kBins>(counts);
  __syncthreads();
  for_each_warp_tile(s.t.tiles, [&](int64_t tile) {
    const float* list = s.list(tile);
    for (uint32_t i = uint32_t(lane()); i < s.tiles[tile].candidates; i += kLanes) {
      const uint32_t m = s.rank_by(list, i, scale);
      if (Digit::counts(m, prefix)) atomicAdd(&counts[Digit::bin(m)], 1u);
    }
  });
  find_digit<2>(s, counts);
}

// Counts the candidates to keep, and finds where those of each tile go.
__global__ void __launch_bounds__(kTransformBlock) transform_count_kernel(TransformSelect s) {
  __shared__ uint64_t partial[kLanes];
  const float scale = s.scale();
  const uint32_t threshold = magnitude(s.selection->threshold);
  for_each_warp_tile(s.t.tiles, [&](int64_t tile) {
    const float* list = s.list(tile);
    uint32_t above = 0, equal = 0;
    for (uint32_t i = uint32_t(lane()); i < s.tiles[tile].candidates; i += kLanes) {
      const uint32_t m = s.rank_by(list, i, scale);
      above += m > threshold;
      equal += m == threshold;
    }
    above = warp_sum(above);
    equal = warp_sum(equal);
    if (lane() == 0) {
      s.tiles[tile].above = above;
      s.tiles[tile].equal = equal;
    }
  });
  if (!last_block(&s.state->ticket)) return;
  int64_t above = 0, equal = 0;
  for (int64_t first = 0; first < s.t.tiles; first += kTransformBlock) {
    const int64_t i = first + threadIdx.x;
    TileSelection* tile = s.tiles + i;
    // Both sums fit 32 bits: a block has fewer than 2^23 groups.
    const uint64_t mine = i < s.t.tiles ? tile->above | uint64_t(tile->equal) << 32 : 0;
    uint64_t sum;
    const uint64_t before = block_scan(mine, partial, &sum);
    if (i < s.t.tiles) {
      const int64_t larger = above + int64_t(before & 0xffffffffu), ties = equal + int64_t(before >> 32);
      const int64_t left = s.selection->ties > ties ? s.selection->ties - ties : 0;
      tile->offset = larger + (s.selection->ties - left);
      tile->ties = uint32_t(left < kTransformTile ? left : kTransformTile);
    }
    above += int64_t(sum & 0xffffffffu);
    equal += int64_t(sum >> 32);
  }
}

__global__ void __launch_bounds__(kTransformBlock)
    transform_emit_kernel(TransformSelect s, uint8_t* bitmap, float* values) {
  __shared__ uint32_t marks[kTileWords], ranks[kTileWords], above[kTileWords], equal[kTileWords], partial[kLanes];
  const TransformLayout& t = s.t;
  const float scale = s.scale();
  const uint32_t threshold = magnitude(s.selection->threshold), below = (1u << lane()) - 1;
  const int mine = int(threadIdx.x);
  for (int64_t i = blockIdx.x; i < t.tiles; i += gridDim.x) {
    const int64_t groups = t.groups_of(t.count(i));
    const int words = int(groups + 31) / 32;
    const float* list = s.list(i);
    rank_words(mine < words ? s.marks[i * t.tile_groups() / 32 + mine] : 0, marks, ranks);
    __syncthreads();
    for (int w = warp(); w < words; w += warps()) {
      const bool set = marks[w] >> lane() & 1;
      const uint32_t m = set ? s.rank_by(list, ranks[w] + uint32_t(__popc(marks[w] & below)), scale) : 0;
      const unsigned larger = __ballot_sync(kAllLanes, set && m > threshold);
      const unsigned same = __ballot_sync(kAllLanes, set && m == threshold);
      if (lane() == 0) {
        above[w] = larger;
        equal[w] = same;
      }
    }
    __syncthreads();
    const uint32_t most = s.tiles[i].ties;
    uint32_t ties = mine < words ? equal[mine] : 0, keep = mine < words ? above[mine] : 0, total;
    uint32_t tie = block_scan(uint32_t(__popc(ties)), partial, &total);
    for (; ties && tie < most; ties &= ties - 1, ++tie) keep |= ties & (0u - ties);
    store_word(bitmap + i * t.tile_groups() / 8, mine, groups, keep);
    const uint32_t kept = rank_words(keep, above, equal);
    __syncthreads();
    float* to = values + t.group * s.tiles[i].offset;
    for (int w = warp(); w < words; w += warps()) {
      if (!(above[w] >> lane() & 1)) continue;
      const uint32_t from = ranks[w] + uint32_t(__popc(marks[w] & below));
      const uint32_t place = equal[w] + uint32_t(__popc(above[w] & below));
      to[place] = list[from];
      if (t.group == 2) to[kept + place] = list[t.tile_groups() + from];
    }
  }
}

// --- decoding

struct TransformParts {
  TransformPart of[kMostParts];
  int count;
};

// counts[part * tiles + tile] = the number of bits set. One warp per part and tile.
__global__ void __launch_bounds__(kBlock)
    transform_parts_count_kernel(TransformLayout t, TransformParts parts, uint32_t* counts) {
  for_each_warp_tile(parts.count * t.tiles, [&](int64_t i) {
    const int64_t part = i / t.tiles, tile = i - part * t.tiles, groups = t.groups_of(t.count(tile));
    const uint8_t* bitmap = parts.of[part].bitmap + tile * t.tile_groups() / 8;
    uint32_t set = 0;
#pragma unroll 4
    for (int w = lane(); 32 * w < groups; w += kLanes) set += uint32_t(__popc(load_word(bitmap, w, groups)));
    set = warp_sum(set);
    if (lane() == 0) counts[i] = set;
  });
}

// offsets[part * (tiles + 1) + tile] = the number of bits set before the tile. *invalid, 0 at launch, is kMostParts less
// the index of the first part that is invalid. formats: of the parts, read from the wire where they are to be. One block
// per part.
__global__ void __launch_bounds__(kScanBlock)
    transform_parts_scan_kernel(TransformLayout t, TransformParts parts, const uint32_t* counts, int64_t* offsets,
                                RangeFloat* formats, int32_t* invalid) {
  const int part = int(blockIdx.x);
  const int64_t set = scan_counts(counts + part * t.tiles, t.tiles, offsets + part * (t.tiles + 1));
  if (threadIdx.x != 0) return;
  const int64_t groups = t.groups();
  const bool beyond = groups % 8 && parts.of[part].bitmap[groups / 8] >> (groups % 8);
  const uint8_t* wire = parts.of[part].wire;
  RangeFloat format = parts.of[part].format;
  const bool known = !wire || range_of_wire(load_bytes<uint64_t>(wire), format.bits, &format);
  formats[part] = format;
  if (set != parts.of[part].count || beyond || !known) atomicMax(invalid, kMostParts - part);
}

__global__ void __launch_bounds__(kTransformBlock, kTransformBlocks)
    transform_decode_kernel(TransformLayout t, TransformParts parts, const int64_t* offsets, const RangeFloat* formats,
                            const int32_t* invalid, float weight, bool add, float* out, int32_t* failed) {
  if (*invalid) {
    for (int64_t i = grid_thread(); i < t.n; i += grid_threads()) out[i] = undecodable();
    if (failed && grid_thread() == 0) *failed = 1 + kMostParts - *invalid;
    return;
  }
  __shared__ uint32_t words[kTileWords], ranks[kTileWords];
  const uint32_t below = (1u << lane()) - 1;
  Tile tile(t);
  for (int64_t i = blockIdx.x; i < t.tiles; i += gridDim.x) {
    tile.open(i);
    for (int j = int(threadIdx.x); j < tile.length * tile.pitch; j += kTransformBlock) tile.z[j] = 0.0f;
    for (int c = 0; c < parts.count; ++c) {
      const TransformPart& part = parts.of[c];
      const int64_t first = t.group * offsets[c * (t.tiles + 1) + i];
      const uint32_t many =
          rank_words(load_word(part.bitmap + i * t.tile_groups() / 8, threadIdx.x, tile.groups), words, ranks);
      __syncthreads();
      const RangeFloat format = formats[c];
      const auto value = [&](int64_t j) {
        const uint32_t code = read_bits(part.packed, part.packed_nbytes, (first + j) * format.bits, format.bits);
        return weight * range_decode(format, code);
      };
      tile.for_each_group([&](int g, int re, int im) {
        const uint32_t set = g < tile.groups ? words[g / 32] : 0;
        if (!(set >> lane() & 1)) return;
        const uint32_t rank = ranks[g / 32] + uint32_t(__popc(set & below));
        tile.z[re] += value(rank);
        if (t.group == 2) tile.z[im] += value(int64_t(many) + rank);
      });
    }
    tile.inverse();
    float* to = out + t.begin(i);
    tile.store([&](int e, float sum) { to[e] = add ? to[e] + sum : sum; });
    __syncthreads();
  }
}

}  // namespace gradzip::cuda
