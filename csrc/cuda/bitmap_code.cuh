// Entropy-coded status bitmaps (common/bitmap_code.h). A warp writes or reads a segment; a lane has a word of its
// bits or stream.
#pragma once

#include "common/bitmap_code.h"
#include "cuda/block/bitmap_tiles.cuh"
#include "cuda/block/bytes.cuh"
#include "cuda/block/table.cuh"

namespace gradzip::cuda {

static_assert(kMostSegment == kLanes * 32, "a word for each lane");

GZ_DEVICE int64_t grid_warp() { return grid_thread() / kLanes; }
GZ_DEVICE int64_t grid_warps() { return grid_threads() / kLanes; }

// Bits of a segment of a bitmap of n bits. size: of segments, but for the last one.
GZ_DEVICE int segment_bits(int64_t n, int size, int64_t segment) {
  const int64_t left = n - segment * size;
  return int(left < size ? left : size);
}

// Which bits this lane has of a segment of `bits` bits.
GZ_DEVICE uint32_t lane_mask(int bits) {
  const int left = bits - 32 * lane();
  return left >= 32 ? ~0u : left > 0 ? (1u << left) - 1 : 0u;
}

// Calls word(at) for this lane's word of a segment, or byte(at, shift) for each byte of one that is cut off or not
// aligned.
template <class Word, class Byte>
GZ_DEVICE void at_lane(const uint8_t* segment, int bits, Word word, Byte byte) {
  const int left = bits - 32 * lane();
  if (left >= 32 && reinterpret_cast<uintptr_t>(segment) % 4 == 0) return word(4 * lane());
#pragma unroll
  for (int b = 0; b < 4; ++b)
    if (8 * b < left) byte(4 * lane() + b, 8 * b);
}

GZ_DEVICE uint32_t load_bits(const uint8_t* segment, int bits) {
  uint32_t found = 0;
  at_lane(
      segment, bits, [&](int at) { found = __ldg(reinterpret_cast<const uint32_t*>(segment + at)); },
      [&](int at, int shift) { found |= uint32_t(segment[at]) << shift; });
  return found & lane_mask(bits);
}

GZ_DEVICE void store_bits(uint8_t* segment, int bits, uint32_t word) {
  at_lane(
      segment, bits, [&](int at) { *reinterpret_cast<uint32_t*>(segment + at) = word; },
      [&](int at, int shift) { segment[at] = uint8_t(word >> shift); });
}

// f(b) for each byte b of a segment's stream, which begins at any address. Lanes take neighbouring bytes.
template <class F>
GZ_DEVICE void for_each_byte(int nbytes, F f) {
#pragma unroll
  for (int first = 0; first < kMostSegment / 8; first += kLanes)
    if (first + lane() < nbytes) f(first + lane());
}

GZ_DEVICE int highest(uint32_t word) { return 31 - __clz(int(word)); }  // bit that is set; -1 if none is

// This lane's part of a segment's codes, with k > 0 low bits. A zero belongs to the lane in which its 2^k clear bits
// end, which may be one before the lane of the code's set bit.
struct LaneCodes {
  uint32_t word;
  int k, clear;  // clear: bits between the last set one before the word and the word

  // set: the lanes whose words are not 0.
  GZ_DEVICE LaneCodes(uint32_t word, uint32_t set, int k) : word(word), k(k) {
    const int from = highest(set & ((1u << lane()) - 1));
    const int bit = __shfl_sync(kAllLanes, highest(word), from < 0 ? 0 : from);
    clear = from < 0 ? 32 * lane() : 32 * (lane() - from) - 1 - bit;
  }

  // The bits of the word at which 2^k clear ones end, each a zero of a code. All periods of a gap are found at once.
  GZ_DEVICE uint32_t zeros() const {
    const int period = 1 << k, first = period - 1 - (clear & (period - 1));
    uint32_t run = ~word;  // whether `length` bits up to this one are clear, as far as they are in the word
    int length = 1;
    for (; length < period && length < 32; length *= 2) run &= run << length | ((1u << length) - 1);
    uint32_t found = first < 32 ? 1u << first : 0u;
    if (k < 5) found |= word << period;
    found &= run;
    for (; length < 32; length *= 2) {
      found |= found << length & run;
      run &= run << length;
    }
    return found;
  }

  // Length in bits of this lane's part: up to its highest set bit `last`, or all of it (32).
  GZ_DEVICE int length(uint32_t zeros, int last) const {
    return __popc(last < 32 ? zeros & ((1u << last) - 1) : zeros) + (1 + k) * __popc(word);
  }

  // The low bits of the code of the highest set bit.
  GZ_DEVICE uint32_t last_low() const {
    const int last = highest(word), before = highest(word & ((1u << last) - 1));
    const int gap = before < 0 ? last + clear : last - before - 1;
    return uint32_t(gap) & ((1u << k) - 1);
  }

  // Sets the bits of the codes in a stream of zeros. bit: where this lane's part begins.
  GZ_DEVICE void write(uint32_t bit, uint32_t* stream) const {
    const uint32_t fixed = uint32_t(1 + k);
    int next = -clear;
    bit -= uint32_t(clear >> k) + fixed;  // without the zeros of the first code that are parts of lanes before
    for (uint32_t left = word; left; left &= left - 1) {
      const int at = __ffs(int(left)) - 1;
      const uint32_t gap = uint32_t(at - next);
      next = at + 1;
      bit += (gap >> k) + fixed;
      const uint64_t code = uint64_t(1u | (gap & ((1u << k) - 1)) << 1) << (bit % 32);
      atomicOr(stream + bit / 32, uint32_t(code));
      if (code >> 32) atomicOr(stream + bit / 32 + 1, uint32_t(code >> 32));
    }
  }
};

// The sizes of the segments of a stream, and where they begin behind the entries.
struct BitmapSegments {
  int64_t count;
  uint32_t* sizes;
  int64_t* offsets;
};

struct BitmapPlan {
  BitmapSource source;
  BitmapSegments segments;
  uint16_t* entries;
};

// Plans each segment.
__global__ void __launch_bounds__(kBlock) bitmap_plan_kernel(Batch<BitmapPlan> batch) {
  const BitmapPlan& plan = batch.of[blockIdx.y];
  const uint8_t* bitmap = plan.source.bitmap;
  const int64_t n = plan.source.n, segments = plan.segments.count;
  const int size = int(plan.source.segment);
  for (int64_t s = grid_warp(); s < segments; s += grid_warps()) {
    const int bits = segment_bits(n, size, s);
    uint32_t word = load_bits(bitmap + s * (size / 8), bits);
    int count = warp_sum(__popc(word));
    const bool inverted = 2 * count > bits;
    if (inverted) word ^= lane_mask(bits), count = bits - count;
    const uint32_t set = __ballot_sync(kAllLanes, word != 0);
    const int end = highest(set);  // the last lane with a set bit
    int nbytes = 0, k = 0;
    if (set) {
      nbytes = 4 * end + __shfl_sync(kAllLanes, highest(word), end) / 8 + 1;
      k = bitmap_low_bits(count, bits);
    }
    if (k > 0) {
      const LaneCodes codes(word, set, k);
      const int last = lane() == end ? highest(word) : 32;
      int used = warp_sum(lane() <= end ? codes.length(codes.zeros(), last) : 0);
      const uint32_t low = __shfl_sync(kAllLanes, lane() == end ? codes.last_low() : 0u, end);
      used += highest(low) + 1 - k;  // trailing zeros are not stored
      const int coded = (used + 7) / 8;
      if (coded < nbytes)
        nbytes = coded;
      else
        k = 0;
    }
    if (lane() == 0) {
      plan.entries[s] = pack_segment({nbytes, k, inverted});
      plan.segments.sizes[s] = uint32_t(nbytes);
    }
  }
}

// Finds where segments begin: one block for each stream.
template <class Entry>
__global__ void __launch_bounds__(kScanBlock) bitmap_scan_kernel(Batch<Entry> batch) {
  const auto [count, sizes, offsets] = batch.of[blockIdx.y].segments;
  scan_counts(sizes, count, offsets);
}

__global__ void __launch_bounds__(kBlock) bitmap_write_kernel(Batch<BitmapPlan> batch) {
  __shared__ uint32_t rooms[kBlock / kLanes][kLanes];
  uint32_t* stream = rooms[warp()];
  const BitmapPlan& of = batch.of[blockIdx.y];
  const uint8_t* bitmap = of.source.bitmap;
  const int64_t n = of.source.n, segments = of.segments.count;
  const int size = int(of.source.segment);
  const int64_t* offsets = of.segments.offsets;
  uint8_t* out = of.source.out;
  if (grid_thread() == 0) *of.source.nbytes = 2 * segments + offsets[segments];
  for (int64_t s = grid_warp(); s < segments; s += grid_warps()) {
    const uint16_t entry = of.entries[s];
    const BitmapSegment plan = unpack_segment(entry);
    if (lane() < 2) out[2 * s + lane()] = uint8_t(entry >> (8 * lane()));
    const int bits = segment_bits(n, size, s);
    uint32_t word = load_bits(bitmap + s * (size / 8), bits);
    if (plan.inverted) word ^= lane_mask(bits);
    stream[lane()] = plan.k > 0 ? 0u : word;
    __syncwarp();
    if (plan.k > 0) {
      const LaneCodes codes(word, __ballot_sync(kAllLanes, word != 0), plan.k);
      const int length = codes.length(codes.zeros(), 32);
      codes.write(uint32_t(warp_scan(length) - length), stream);
      __syncwarp();
    }
    uint8_t* to = out + 2 * segments + offsets[s];
    for_each_byte(plan.nbytes, [&](int b) { to[b] = reinterpret_cast<const uint8_t*>(stream)[b]; });
    __syncwarp();  // `stream` is used again
  }
}

// What is known of a stream that is being decoded; 0 at launch.
struct BitmapCheck {
  int64_t set;
  int32_t corrupt;
};

GZ_DEVICE uint16_t load_entry(const uint8_t* stream, int64_t segment) {
  return load_bytes<uint16_t>(stream + 2 * segment);
}

struct BitmapRead {
  BitmapStream stream;
  BitmapSegments segments;
  BitmapCheck* check;
};

// The segment sizes that the streams claim.
__global__ void __launch_bounds__(kBlock) bitmap_sizes_kernel(Batch<BitmapRead> batch) {
  const BitmapRead& read = batch.of[blockIdx.y];
  const uint8_t* stream = read.stream.bytes;
  const int64_t nbytes = read.stream.nbytes, n = read.stream.n, segments = read.segments.count;
  const int size = int(read.stream.segment);
  for (int64_t s = grid_thread(); s < segments; s += grid_threads()) {
    const uint16_t entry = 2 * s + 2 <= nbytes ? load_entry(stream, s) : uint16_t(0);
    read.segments.sizes[s] = uint32_t(unpack_segment(entry).nbytes);
    if (!valid_segment(entry, segment_bits(n, size, s))) report(&read.check->corrupt);
  }
}

// How many bits of the next word belong to the last code of this word, for each number `skip` of bits of this word that
// belong to a code before: in bits [4 * skip, 4 * skip + 4). Here, a code begins with its one.
GZ_DEVICE uint64_t overhangs(uint32_t word, int k) {
  uint32_t low = 0x76543210u, high = 0xfedcba98u;  // of reading that begins at bit 32, 33, ...
#pragma unroll
  for (int bit = 31; bit >= 0; --bit) {
    const uint32_t behind = uint32_t((uint64_t(high) << 32 | low) >> (4 * k));
    const uint32_t here = word & 1u << bit ? behind : low;
    high = high << 4 | low >> 28;
    low = low << 4 | (here & 15u);
  }
  return uint64_t(high) << 32 | low;
}

// Sets the bits of a segment in a bitmap of zeros. word: of the stream, whose codes have k > 0 low bits. Returns false
// if a bit would be past the longest segment.
GZ_DEVICE bool read_codes(uint32_t word, int k, uint32_t* bitmap) {
  // Each lane assumes that a code begins with its word, then that it begins where the lane before says, until no lane
  // changes its mind. That takes few rounds: wherever reading begins, it soon meets the codes' true beginnings. After a
  // round for each lane before it, a lane is right.
  constexpr int kRounds = 4;  // between votes
  const uint64_t over = overhangs(word, k);
  const auto past_of = [&](int skip) { return int(over >> (4 * skip) & 15u); };
  int skip = 0;
  for (int round = 0; round < kLanes - 1; round += kRounds) {
    int last = 0;
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int before = __shfl_up_sync(kAllLanes, past_of(skip), 1);
      last = skip;
      skip = lane() ? before : 0;
    }
    if (!__any_sync(kAllLanes, skip != last)) break;
  }
  const int past = past_of(skip);
  uint32_t ones = 0;  // that begin codes
  const uint32_t behind = 0u - (2u << k);
  for (uint32_t left = word >> skip << skip; left;) {
    const uint32_t one = left & (0u - left);
    ones |= one;
    left &= one * behind;
  }
  const uint32_t next = __shfl_down_sync(kAllLanes, word, 1), mask = (1u << k) - 1;
  const uint64_t both = uint64_t(lane() < kLanes - 1 ? next : 0u) << 32 | word;
  // How many bits of the segment this word stands for: a code for a set bit and as many clear ones as its low bits say,
  // a zero for 2^k clear ones.
  const int codes = __popc(ones), zeros = 32 - skip - (1 + k) * codes + past;
  int upto = (zeros << k) + codes;
  for (int b = 0; b < k; ++b) upto += __popc(ones & uint32_t(both >> (1 + b))) << b;
  // A code at bit b, with a sum of low bits before and in it, is at place begin + (b << k) + sum.
  uint32_t begin = uint32_t(warp_scan(upto) - upto) - (uint32_t(skip) << k);
  const uint64_t lows = both >> 1;
  const uint32_t period = 1u << k, code = 1u - (uint32_t(1 + k) << k);
  for (uint32_t left = ones; left; left &= left - 1) {
    const int one = __ffs(int(left)) - 1;
    begin += uint32_t(lows >> one) & mask;
    const uint32_t place = begin + uint32_t(one) * period;
    begin += code;
    if (place >= uint32_t(kMostSegment)) return false;
    atomicOr(bitmap + place / 32, 1u << (place % 32));
  }
  return true;
}

// Reads the segments if their sizes add up to that of the stream, or, unless `exact`, to less.
__global__ void __launch_bounds__(kBlock) bitmap_read_kernel(Batch<BitmapRead> batch, bool exact) {
  __shared__ uint32_t rooms[kBlock / kLanes][2][kLanes];
  uint32_t *coded = rooms[warp()][0], *read = rooms[warp()][1];
  const BitmapRead& of = shared_entry(batch);
  const uint8_t* stream = of.stream.bytes;
  const int64_t nbytes = of.stream.nbytes, n = of.stream.n, segments = of.segments.count;
  const int size = int(of.stream.segment);
  uint8_t* bitmap = of.stream.bitmap;
  BitmapCheck* check = of.check;
  const int64_t* offsets = of.segments.offsets;
  const int64_t end = 2 * segments + offsets[segments];
  if (end > nbytes || (exact && end < nbytes)) {
    report(&check->corrupt);
    return;
  }
  bool valid = true;
  int set = 0;
  for (int64_t s = grid_warp(); s < segments; s += grid_warps()) {
    const BitmapSegment entry = unpack_segment(load_entry(stream, s));
    const uint8_t* bytes = stream + 2 * segments + offsets[s];
    coded[lane()] = read[lane()] = 0;
    __syncwarp();
    for_each_byte(entry.nbytes, [&](int b) { reinterpret_cast<uint8_t*>(coded)[b] = __ldg(bytes + b); });
    __syncwarp();
    uint32_t word = coded[lane()];
    if (entry.k > 0) {
      valid &= read_codes(word, entry.k, read);
      __syncwarp();
      word = read[lane()];
    }
    const int bits = segment_bits(n, size, s);
    const uint32_t mask = lane_mask(bits);
    valid &= !(word & ~mask);
    if (entry.inverted) word ^= mask;
    set += __popc(word);
    store_bits(bitmap + s * (size / 8), bits, word);
    __syncwarp();  // the rooms are used again
  }
  if (!valid) report(&check->corrupt);
  set = warp_sum(set);
  if (lane() == 0) atomic_add(&check->set, int64_t(set));
}

// A corrupt stream gets a bitmap that certainly has another number of bits set. first: the index of the first stream.
__global__ void __launch_bounds__(kBlock) bitmap_check_kernel(Batch<BitmapRead> batch, int32_t first, int32_t* failed) {
  const BitmapRead& read = batch.of[blockIdx.y];
  const BitmapCheck& check = *read.check;
  const int64_t set = read.stream.set, n = read.stream.n;
  if (!check.corrupt && check.set == set) return;
  if (failed && grid_thread() == 0) atomicExch(failed, 1 + first + int32_t(blockIdx.y));
  uint8_t* bitmap = read.stream.bitmap;
  for (int64_t w = grid_thread(); 32 * w < n; w += grid_threads()) store_word(bitmap, w, n, set > 0 ? 0u : ~0u);
}

}  // namespace gradzip::cuda
