// Entropy-coded status bitmaps (common/bitmap_code.h). A thread writes or reads a segment, code by code.
#pragma once

#include "common/bitmap_code.h"
#include "cuda/block/bit_stream.cuh"
#include "cuda/block/bitmap_tiles.cuh"
#include "cuda/block/bytes.cuh"

namespace gradzip::cuda {

// The bits of a segment, inverted or not.
struct SegmentBits {
  const uint8_t* bitmap;
  int64_t n, segment;
  int size;  // of segments, but for the last one
  bool inverted;

  GZ_DEVICE int bits() const {
    const int64_t left = n - segment * size;
    return int(left < size ? left : size);
  }
  GZ_DEVICE uint32_t word(int w) const {
    const uint32_t word = load_word(bitmap, segment * (size / 32) + w, n);
    if (!inverted) return word;
    const int left = bits() - 32 * w;
    return left >= 32 ? ~word : left > 0 ? ~word & ((1u << left) - 1) : 0u;
  }
  // f(g) for each set bit, after g clear ones.
  template <class F>
  GZ_DEVICE void for_each_gap(F f) const {
    int next = 0;
    for (int w = 0; w < size / 32; ++w)
      for (uint32_t left = word(w); left; left &= left - 1) {
        const int at = 32 * w + __ffs(int(left)) - 1;
        f(at - next);
        next = at + 1;
      }
  }
  // The bytes of the stream for a k, without the zero bytes at its end.
  GZ_DEVICE int nbytes(int k) const {
    int bit = 0, used = 0;
    for_each_gap([&](int gap) {
      const uint32_t low = uint32_t(gap) & ((1u << k) - 1);
      bit += gap >> k;
      used = bit + 1 + (low ? 32 - __clz(int(low)) : 0);
      bit += 1 + k;
    });
    return (used + 7) / 8;
  }
};

// Plans each segment. sizes[s] = its bytes.
__global__ void __launch_bounds__(kBlock) bitmap_plan_kernel(const uint8_t* bitmap, int64_t n, int size,
                                                             int64_t segments, uint16_t* entries, uint32_t* sizes) {
  for (int64_t s = grid_thread(); s < segments; s += grid_threads()) {
    SegmentBits segment{bitmap, n, s, size, false};
    const int bits = segment.bits();
    int count = 0;
    for (int w = 0; w < size / 32; ++w) count += __popc(segment.word(w));
    segment.inverted = 2 * count > bits;
    if (segment.inverted) count = bits - count;
    int k = count ? bitmap_low_bits(count, bits) : 0, nbytes = segment.nbytes(0);
    if (k > 0) {
      const int coded = segment.nbytes(k);
      if (coded < nbytes)
        nbytes = coded;
      else
        k = 0;
    }
    entries[s] = pack_segment({nbytes, k, segment.inverted});
    sizes[s] = uint32_t(nbytes);
  }
}

// offsets[s] is the position of segment s behind the entries.
__global__ void __launch_bounds__(kBlock)
    bitmap_write_kernel(const uint8_t* bitmap, int64_t n, int size, int64_t segments, const uint16_t* entries,
                        const int64_t* offsets, uint8_t* out, int64_t* nbytes) {
  if (grid_thread() == 0) *nbytes = 2 * segments + offsets[segments];
  for (int64_t s = grid_thread(); s < segments; s += grid_threads()) {
    const BitmapSegment plan = unpack_segment(entries[s]);
    out[2 * s] = uint8_t(entries[s]);
    out[2 * s + 1] = uint8_t(entries[s] >> 8);
    uint8_t *at = out + 2 * segments + offsets[s], *end = at + plan.nbytes;
    uint32_t pending = 0;
    int filled = 0;
    const auto put = [&](uint32_t bits, int length) {  // length <= 16
      pending |= bits << filled;
      for (filled += length; filled >= 8; filled -= 8, pending >>= 8)
        if (at < end) *at++ = uint8_t(pending);
    };
    SegmentBits{bitmap, n, s, size, plan.inverted}.for_each_gap([&](int gap) {
      int zeros = gap >> plan.k;
      for (; zeros > 0; zeros -= 16) put(0, zeros < 16 ? zeros : 16);
      put(1u | (uint32_t(gap) & ((1u << plan.k) - 1)) << 1, 1 + plan.k);
    });
    if (at < end) *at = uint8_t(pending);
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

// Streams that one launch decodes: blocks with the same y share one.
constexpr int kMostStreams = 16;
struct BitmapStreams {
  BitmapStream of[kMostStreams];
};

// The segment sizes that the streams claim.
__global__ void __launch_bounds__(kBlock) bitmap_sizes_kernel(BitmapStreams streams, int64_t n, int size,
                                                              int64_t segments, uint32_t* sizes, BitmapCheck* checks) {
  const uint8_t* stream = streams.of[blockIdx.y].bytes;
  const int64_t nbytes = streams.of[blockIdx.y].nbytes;
  sizes += blockIdx.y * segments;
  for (int64_t s = grid_thread(); s < segments; s += grid_threads()) {
    const uint16_t entry = 2 * s + 2 <= nbytes ? load_entry(stream, s) : uint16_t(0);
    sizes[s] = uint32_t(unpack_segment(entry).nbytes);
    if (!valid_segment(entry, SegmentBits{nullptr, n, s, size, false}.bits())) report(&checks[blockIdx.y].corrupt);
  }
}

// Where segments begin behind the entries: one block for each stream.
__global__ void __launch_bounds__(kScanBlock)
    bitmap_scan_kernel(const uint32_t* sizes, int64_t segments, int64_t* offsets) {
  scan_counts(sizes + blockIdx.x * segments, segments, offsets + blockIdx.x * (segments + 1));
}

// Reads the segments if their sizes add up to that of the stream, or, unless `exact`, to less.
__global__ void __launch_bounds__(kBlock)
    bitmap_read_kernel(BitmapStreams streams, int64_t n, int size, int64_t segments, bool exact, const int64_t* offsets,
                       BitmapCheck* checks) {
  const uint8_t* stream = streams.of[blockIdx.y].bytes;
  const int64_t nbytes = streams.of[blockIdx.y].nbytes;
  uint8_t* bitmap = streams.of[blockIdx.y].bitmap;
  BitmapCheck* check = checks + blockIdx.y;
  offsets += blockIdx.y * (segments + 1);
  const int64_t end = 2 * segments + offsets[segments];
  if (end > nbytes || (exact && end < nbytes)) {
    report(&check->corrupt);
    return;
  }
  for (int64_t s = grid_thread(); s < segments; s += grid_threads()) {
    const BitmapSegment entry = unpack_segment(load_entry(stream, s));
    const SegmentBits segment{bitmap, n, s, size, entry.inverted};
    const uint8_t* bytes = stream + 2 * segments + offsets[s];
    const int bits = segment.bits();
    int at = 0, bit = 0, words = 0, set = 0;  // words: those stored
    uint32_t word = 0;
    const auto store_upto = [&](int end) {
      for (; words < end; ++words, word = 0) {
        const int left = bits - 32 * words;
        if (entry.inverted) word ^= left >= 32 ? ~0u : left > 0 ? (1u << left) - 1 : 0u;
        set += __popc(word);
        store_word(bitmap, s * (size / 32) + words, n, word);
      }
    };
    while (bit < 8 * entry.nbytes) {
      constexpr int kZeros = 16;  // after fewer, the rest of the code is within 32 bits
      const uint32_t next = read_bits(bytes, entry.nbytes, bit, 32);
      const int zeros = next << (32 - kZeros) ? __ffs(int(next)) - 1 : kZeros;
      at += zeros << entry.k;
      bit += zeros;
      if (zeros == kZeros) continue;
      at += int(next >> (zeros + 1) & ((1u << entry.k) - 1));
      bit += 1 + entry.k;
      if (at >= bits) {
        report(&check->corrupt);
        break;
      }
      store_upto(at / 32);
      word |= 1u << (at % 32);
      ++at;
    }
    store_upto(size / 32);
    atomic_add(&check->set, int64_t(set));
  }
}

// A corrupt stream gets a bitmap that certainly has another number of bits set. first: the index of the first stream.
__global__ void __launch_bounds__(kBlock)
    bitmap_check_kernel(BitmapStreams streams, const BitmapCheck* checks, int64_t n, int32_t first, int32_t* failed) {
  const BitmapCheck& check = checks[blockIdx.y];
  const int64_t set = streams.of[blockIdx.y].set;
  if (!check.corrupt && check.set == set) return;
  if (failed && grid_thread() == 0) atomicExch(failed, 1 + first + int32_t(blockIdx.y));
  uint8_t* bitmap = streams.of[blockIdx.y].bitmap;
  for (int64_t w = grid_thread(); 32 * w < n; w += grid_threads()) store_word(bitmap, w, n, set > 0 ? 0u : ~0u);
}

}  // namespace gradzip::cuda
