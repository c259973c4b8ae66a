// Transforms of short blocks, fused with the selection of the largest coefficients and with decoding: coefficients that are
// not wanted never leave a block.
//
// A kernel takes the kind of tile that it works on: `Tile` has every transform, `RowTile` one. A block makes one. It has
// open(i)                 chooses tile i
// load(x, dtype, first)   the elements of the tile, from element `first` of x on
// forward(), inverse()    from elements to coefficients, and back
// clear()                 all coefficients are zero
// store(to, add)          the elements of the tile, or adds them
// vote(votes, f)          votes[v] has f(real part, imaginary part) for 32 groups, neighbours in the bitmap
// for_each_group(f)       f(v, real part, imaginary part) for the groups of this thread: its lane's bit of vote v. Parts are
//                         passed by reference.
// bitmap_word(votes, w)   word w of the bitmap of votes
// vote_of(bitmap, v)      the bits of vote v in a bitmap in memory
// window()                shared memory for kWindow floats, between `clear` and `inverse`
//
// Selection reads x twice. The first pass finds the leading bits of the k-th largest magnitude (cuda/select.cuh). The
// second one writes the candidates, coefficients that have at least these bits, and the passes after it read only those.
#pragma once

#include "common/transform.h"
#include "cuda/block/bitmap_tiles.cuh"
#include "cuda/block/bytes.cuh"
#include "cuda/block/code_stream.cuh"
#include "cuda/block/quads.cuh"
#include "cuda/block/ranked_words.cuh"
#include "cuda/block/selected_tiles.cuh"
#include "cuda/select.cuh"
#include "cuda/transform_rows.cuh"
#include "cuda/transform_tile.cuh"

namespace gradzip::cuda {

template <class T>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks)
    transform_kernel(TransformLayout t, const float* x, float* coefficients) {
  T tile(t);
  for (unsigned i = blockIdx.x; i < t.tiles; i += gridDim.x) {
    tile.open(i);
    tile.load(x, int64_t(Dtype::float32), t.begin(i));
    tile.forward();
    float* to = coefficients + t.begin(i);
    tile.for_each_group([&](int v, float re, float im) {
      const int g = kLanes * v + lane();
      to[g] = re;
      if (t.group == 2) to[tile.groups + g] = im;
    });
  }
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks)
    transform_inverse_kernel(TransformLayout t, const float* coefficients, float* x) {
  T tile(t);
  for (unsigned i = blockIdx.x; i < t.tiles; i += gridDim.x) {
    tile.open(i);
    const float* from = coefficients + t.begin(i);
    tile.for_each_group([&](int v, float& re, float& im) {
      const int g = kLanes * v + lane();
      re = __ldg(from + g);
      if (t.group == 2) im = __ldg(from + tile.groups + g);
    });
    tile.inverse();
    tile.store(x + t.begin(i), false);
  }
}

// --- selection

// Zero at the first pass.
struct TransformSelectState {
  SelectState select;
  uint32_t ticket;
};

// A magnitude to rank a group by: its coefficient, or the energy of its pair.
GZ_DEVICE uint32_t transform_rank(int group, float re, float im, float scale) {
  if (group == 1) return magnitude(re);
  const float a = re * scale, b = im * scale;
  return magnitude(a * a + b * b);
}

struct TransformSelect {
  TransformLayout t;
  const void* x;
  int64_t dtype, k;
  uint8_t* bitmap;
  float* values;
  const float* amax;  // of the data; used for pairs
  TransformSelectState* state;
  Selection* selection;
  SelectedTile* tiles;
  uint32_t* marks;  // the bitmap of candidates, in whole words
  float* candidates;  // a tile's begin where the tile does: real parts, and, tile_groups() later, imaginary parts

  GZ_DEVICE float scale() const { return t.group == 2 ? unit_scale(*amax) : 1.0f; }
  GZ_DEVICE uint32_t rank_by(const float* list, uint32_t i, float scale) const {
    return transform_rank(t.group, list[i], t.group == 2 ? list[t.tile_groups() + i] : 0.0f, scale);
  }
  GZ_DEVICE float* list(int64_t tile) const { return candidates + t.begin(tile); }
};

template <int kThreads, int kCount>
GZ_DEVICE void clear_counts(uint32_t (&counts)[kCount]) {
  for (int i = int(threadIdx.x); i < kCount; i += kThreads) counts[i] = 0;
  __syncthreads();
}

// The end of pass kPass: all threads have counted, in kCopies histograms.
template <int kPass, int kThreads, int kCopies = 1>
GZ_DEVICE void find_digit(const TransformSelect& s, const uint32_t* counts) {
  using Digit = SelectDigit<kPass>;
  SelectState* state = &s.state->select;
  uint64_t* histogram = state->histogram[kPass];
  __syncthreads();
  for (int bin = int(threadIdx.x); bin < Digit::kBins; bin += kThreads) {
    uint32_t count = 0;
    for (int c = 0; c < kCopies; ++c) count += counts[kCopies * bin + c];
    if (count) atomic_add(&histogram[bin], count);
  }
  if (last_block(&state->ticket[kPass]))
    select_find<Digit::kBins, kThreads>(s.k, Digit::kShift, kPass == kSelectPasses - 1, histogram, state, s.selection);
}

// Finds the first digit of the k-th largest magnitude.
template <class T>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks) transform_rank_kernel(Batch<TransformSelect> batch) {
  const TransformSelect& s = shared_entry(batch);
  using Digit = SelectDigit<0>;
  // Neighbouring lanes add to different copies, and for zeros, which do not count, to numbers of their own: this takes
  // fewer instructions than a branch.
  constexpr int kZeros = T::kCopies * Digit::kBins;
  __shared__ uint32_t counts[kZeros + kLanes];
  clear_counts<T::kThreads>(counts);
  const int copy = lane() % T::kCopies, none = kZeros + lane();
  const float scale = s.scale();
  T tile(s.t);
  for (unsigned i = blockIdx.x; i < s.t.tiles; i += gridDim.x) {
    tile.open(i);
    tile.load(s.x, s.dtype, s.t.begin(i));
    tile.forward();
    tile.for_each_group([&](int, float re, float im) {
      const uint32_t m = transform_rank(tile.group(), re, im, scale);
      atomicAdd(&counts[Digit::counts(m, 0) ? T::kCopies * Digit::bin(m) + copy : none], 1u);
    });
  }
  find_digit<0, T::kThreads, T::kCopies>(s, counts);
}

// Writes the candidates, those that share the first digit or have a larger one, and finds the second digit. All groups
// are candidates if fewer than k are not zero.
template <class T>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks) transform_collect_kernel(Batch<TransformSelect> batch) {
  const TransformSelect& s = shared_entry(batch);
  using Digit = SelectDigit<1>;
  __shared__ uint32_t counts[Digit::kBins + kLanes];
  __shared__ RankedWord votes[T::kVotes];
  clear_counts<T::kThreads>(counts);
  const float scale = s.scale();
  const bool done = s.state->select.done;
  // What has another first digit counts in a bin past the last one, of any lane: without a branch. Zeros, of which there
  // are all or none among those that count, are in the lowest bin, with the k-th largest or below it.
  const uint32_t low = s.state->select.prefix, first = done ? 0x80000000u : low, past = Digit::kBins + uint32_t(lane());
  T tile(s.t);
  for (unsigned i = blockIdx.x; i < s.t.tiles; i += gridDim.x) {
    tile.open(i);
    tile.load(s.x, s.dtype, s.t.begin(i));
    tile.forward();
    tile.vote(votes, [&](float re, float im) {
      const uint32_t m = transform_rank(tile.group(), re, im, scale), bin = (m - first) >> Digit::kShift;
      atomicAdd(&counts[bin < past ? bin : past], 1u);
      return m >= low;
    });
    const uint32_t total = rank_words<T::kVotes, T::kThreads>(votes, [&](int v) { return votes[v].word; });
    if (threadIdx.x == 0) s.tiles[i].candidates = total;
    __syncthreads();
    uint32_t* marks = s.marks + int64_t(i) * (tile.tile_groups() / 32);
    for (int w = int(threadIdx.x); 32 * w < tile.groups; w += T::kThreads) marks[w] = tile.bitmap_word(votes, w);
    float* list = s.list(i);
    tile.for_each_group([&](int v, float re, float im) {
      const RankedBit bit = ranked_bit(votes[v], lane());
      if (!bit.set) return;
      list[bit.rank] = re;
      if (tile.group() == 2) list[tile.tile_groups() + bit.rank] = im;
    });
  }
  if (!done) find_digit<1, T::kThreads>(s, counts);
}

// f(tile) for the tiles of this warp.
template <class F>
GZ_DEVICE void for_each_warp_tile(int64_t tiles, F f) {
  for (int64_t tile = grid_thread() / kLanes; tile < tiles; tile += grid_threads() / kLanes) f(tile);
}

// Finds the last digit, by the candidates.
__global__ void __launch_bounds__(kTransformBlock) transform_refine_kernel(Batch<TransformSelect> batch) {
  const TransformSelect& s = batch.of[blockIdx.y];
  using Digit = SelectDigit<2>;
  __shared__ uint32_t counts[Digit::kBins];
  if (s.state->select.done) return;
  const float scale = s.scale();
  const uint32_t prefix = s.state->select.prefix;
  clear_counts<kTransformBlock>(counts);
  for_each_warp_tile(s.t.tiles, [&](int64_t tile) {
    const float* list = s.list(tile);
    for (uint32_t i = uint32_t(lane()); i < s.tiles[tile].candidates; i += kLanes) {
      const uint32_t m = s.rank_by(list, i, scale);
      if (Digit::counts(m, prefix)) atomicAdd(&counts[Digit::bin(m)], 1u);
    }
  });
  find_digit<2, kTransformBlock>(s, counts);
}

// Counts the candidates to keep, and finds where those of each tile go.
__global__ void __launch_bounds__(kTransformBlock) transform_count_kernel(Batch<TransformSelect> batch) {
  const TransformSelect& s = batch.of[blockIdx.y];
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
  place_tiles<kTransformBlock>(s.tiles, s.t.tiles, kTransformTile, s.selection->ties);
}

// The lowest bits of `bits`, in order, at the places of the bits set in `mask`.
GZ_DEVICE uint32_t deposit(uint32_t bits, uint32_t mask) {
  uint32_t word = 0;
  for (; mask; mask &= mask - 1, bits >>= 1)
    if (bits & 1) word |= mask & (0u - mask);
  return word;
}

constexpr int kEmitBlock = 128;
constexpr int kTileWords = int(kTransformTile) / 32;  // at most, of a tile's bitmap

// Writes the values to keep, and their bitmap. Works on candidates: those of a tile have a bitmap of their own, of which
// a word has 32 neighbours in the list.
__global__ void __launch_bounds__(kEmitBlock) transform_emit_kernel(Batch<TransformSelect> batch) {
  const TransformSelect& s = shared_entry(batch);
  __shared__ RankedWord marks[kTileWords], kept[kTileWords];  // of groups; of candidates
  __shared__ uint32_t above[kTileWords], equal[kTileWords], partial[kLanes];
  const TransformLayout& t = s.t;
  const int tile_groups = int(t.tile_groups());
  const float scale = s.scale();
  const uint32_t threshold = magnitude(s.selection->threshold);
  for (unsigned i = blockIdx.x; i < t.tiles; i += gridDim.x) {
    const int groups = int(t.groups_of(t.count(i)));
    const SelectedTile tile = s.tiles[i];
    const float* list = s.list(i);
    const uint32_t* from = s.marks + int64_t(i) * (tile_groups / 32);
    rank_words<kTileWords, kEmitBlock>(marks, [&](int w) { return 32 * w < groups ? from[w] : 0; });
    for (uint32_t c = threadIdx.x; c - uint32_t(lane()) < tile.candidates; c += kEmitBlock) {
      const bool inside = c < tile.candidates;
      const uint32_t m = inside ? s.rank_by(list, c, scale) : 0;
      const unsigned larger = __ballot_sync(kAllLanes, inside && m > threshold);
      const unsigned same = __ballot_sync(kAllLanes, inside && m == threshold);
      if (lane() == 0) {
        above[c / 32] = larger;
        equal[c / 32] = same;
      }
    }
    __syncthreads();
    const auto ties_of = [&](int w) { return 32u * uint32_t(w) < tile.candidates ? equal[w] : 0u; };
    uint32_t tie = 0;
    if (tile.ties > 0 && tile.ties < tile.equal) {
      uint32_t total;
      tie = block_scan(uint32_t(__popc(ties_of(2 * int(threadIdx.x))) + __popc(ties_of(2 * int(threadIdx.x) + 1))),
                       partial, &total);
    }
    const uint32_t count = rank_words<kTileWords, kEmitBlock>(kept, [&](int w) {
      if (32u * uint32_t(w) >= tile.candidates) return 0u;
      uint32_t keep = above[w];
      for (uint32_t ties = equal[w]; ties && tie < tile.ties; ties &= ties - 1, ++tie) keep |= ties & (0u - ties);
      return keep;
    });
    __syncthreads();
    float* to = s.values + t.group * tile.offset;
    for (uint32_t c = threadIdx.x; c < tile.candidates; c += kEmitBlock) {
      const RankedBit bit = ranked_bit(kept[c / 32], lane());
      if (!bit.set) continue;
      to[bit.rank] = list[c];
      if (t.group == 2) to[count + bit.rank] = list[tile_groups + c];
    }
    for (int w = int(threadIdx.x); 32 * w < groups; w += kEmitBlock) {
      const uint32_t first = marks[w].before / 32, skip = marks[w].before % 32;
      uint32_t bits = marks[w].word ? kept[first].word >> skip : 0;
      if (skip && first + 1 < kTileWords) bits |= kept[first + 1].word << (32 - skip);
      store_word(s.bitmap + int64_t(i) * (tile_groups / 8), w, groups, deposit(bits, marks[w].word));
    }
  }
}

// --- decoding

// A sum of parts of a launch.
struct TransformSum {
  TransformLayout t;
  float* out;
  int64_t first_tile;  // among those of all parts
  int32_t first, parts, first_of_all, add;  // first: in the launch; first_of_all: in the call
};

// What one launch decodes.
struct TransformSums {
  TransformPart of[kMostParts];
  TransformSum sums[kMostParts];
  int32_t sum_of[kMostParts];  // of each part
};
static_assert(sizeof(TransformSums) < 4000, "it fits the 4 KB that a kernel may have");

// Scratch memory. Of the tiles of each part, and one more: counts and offsets. Of each part: the format, read
// from the wire where it is to be. Of each sum: 0 at launch, kMostParts less the index of its first part that is invalid.
struct TransformScratch {
  uint32_t* counts;
  int64_t* offsets;
  RangeFloat* formats;
  int32_t* invalid;
};

// Where the tiles of a part begin in `counts` and in `offsets`.
GZ_DEVICE int64_t tiles_before(const TransformSum& sum, int part) {
  return sum.first_tile + (part - sum.first) * (sum.t.tiles + 1);
}

// The number of bits set in each tile. One warp per tile; blocks with the same y share a part.
__global__ void __launch_bounds__(kBlock) transform_parts_count_kernel(TransformSums table, TransformScratch scratch) {
  const int part = int(blockIdx.y);
  const TransformSum& sum = table.sums[table.sum_of[part]];
  const TransformLayout& t = sum.t;
  uint32_t* counts = scratch.counts + tiles_before(sum, part);
  for_each_warp_tile(t.tiles, [&](int64_t tile) {
    const int64_t groups = t.groups_of(t.count(tile));
    const uint8_t* bitmap = table.of[part].bitmap + tile * t.tile_groups() / 8;
    uint32_t set = 0;
#pragma unroll 4
    for (int w = lane(); 32 * w < groups; w += kLanes) set += uint32_t(__popc(load_word(bitmap, w, groups)));
    set = warp_sum(set);
    if (lane() == 0) counts[tile] = set;
  });
}

// The number of bits set before each tile. One block per part.
__global__ void __launch_bounds__(kScanBlock)
    transform_parts_scan_kernel(TransformSums table, TransformScratch scratch) {
  const int part = int(blockIdx.x);
  const int32_t index = table.sum_of[part];
  const TransformSum& sum = table.sums[index];
  const int64_t before = tiles_before(sum, part);
  const int64_t set = scan_counts(scratch.counts + before, sum.t.tiles, scratch.offsets + before);
  if (threadIdx.x != 0) return;
  const int64_t groups = sum.t.groups();
  const bool beyond = groups % 8 && table.of[part].bitmap[groups / 8] >> (groups % 8);
  const uint8_t* wire = table.of[part].wire;
  RangeFloat format = table.of[part].format;
  const bool known = !wire || range_of_wire(load_bytes<uint64_t>(wire), format.bits, &format);
  scratch.formats[part] = format;
  if (set != table.of[part].count || beyond || !known)
    atomicMax(scratch.invalid + index, kMostParts - (part - sum.first));
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks)
    transform_decode_kernel(TransformSums table, TransformScratch scratch, float weight, int32_t* failed) {
  const TransformSum& sum = table.sums[blockIdx.y];
  const TransformLayout& t = sum.t;
  if (const int32_t invalid = scratch.invalid[blockIdx.y]) {
    for (int64_t i = grid_thread(); i < t.n; i += grid_threads()) sum.out[i] = undecodable();
    if (failed && grid_thread() == 0) atomicExch(failed, 1 + sum.first_of_all + kMostParts - invalid);
    return;
  }
  __shared__ RankedWord votes[T::kVotes];
  T tile(t);
  for (unsigned i = blockIdx.x; i < t.tiles; i += gridDim.x) {
    tile.open(i);
    tile.clear();
    for (int c = sum.first; c < sum.first + sum.parts; ++c) {
      const TransformPart& part = table.of[c];
      const uint8_t* bitmap = part.bitmap + int64_t(i) * (tile.tile_groups() / 8);
      const uint32_t many = rank_words<T::kVotes, T::kThreads>(votes, [&](int v) { return tile.vote_of(bitmap, v); });
      const RangeFloat format = scratch.formats[c];
      const CodeStream codes(part.packed, part.packed_nbytes, format.bits,
                             tile.group() * scratch.offsets[tiles_before(sum, c) + i]);
      const bool inside = codes.inside(many * uint32_t(tile.group()));
      const uint32_t room = uint32_t(T::kWindow / tile.group());
      for (uint32_t first = 0; first < many; first += room) {
        const uint32_t here = many - first < room ? many - first : room;
        float* values = tile.window();
        // Real parts, then imaginary ones.
        const uint32_t count = here * uint32_t(tile.group());
        const auto code_of = [&](uint32_t j) { return j < here ? first + j : first + j + (many - here); };
        if (inside) {
#pragma unroll 4
          for (uint32_t j = threadIdx.x; j < count; j += T::kThreads)
            values[j] = weight * range_decode(format, codes.read_inside(code_of(j)));
        } else {
#pragma unroll 1
          for (uint32_t j = threadIdx.x; j < count; j += T::kThreads)
            values[j] = weight * range_decode(format, codes.read(code_of(j)));
        }
        __syncthreads();
        tile.for_each_group([&](int v, float& re, float& im) {
          const RankedBit bit = ranked_bit(votes[v], lane());
          const uint32_t at = bit.rank - first;
          if (!bit.set || at >= here) return;
          re += values[at];
          if (tile.group() == 2) im += values[here + at];
        });
        __syncthreads();
      }
    }
    tile.inverse();
    tile.store(sum.out + t.begin(i), sum.add != 0);
  }
}

}  // namespace gradzip::cuda
