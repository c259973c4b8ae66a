// Entropy-coded status bitmaps on the wire, little-endian. The bitmap is cut into segments of equal size. First comes
// an entry per segment, uint16: its size in bytes (10 bits), k (4 bits), whether its bits are inverted (1 bit), 0.
// Then come the segments.
//
// A segment is a bit stream of Rice codes, one per set bit: for a gap of g clear bits before it, g >> k zeros, a one,
// the low k bits of g. Bits past the end of a segment are 0, so trailing zero bytes are dropped. With k = 0 the stream
// is the segment itself, which bounds its size. Segments are coded by themselves: each adapts to its own density, and
// they are coded and decoded in parallel.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace gradzip {

constexpr int kMostSegment = 1024;  // bits of a segment, at most; a multiple of 64

struct BitmapSegment {
  int nbytes, k;
  bool inverted;
};

GZ_HD constexpr uint16_t pack_segment(const BitmapSegment& segment) {
  return uint16_t(segment.nbytes | segment.k << 10 | int(segment.inverted) << 14);
}
GZ_HD constexpr BitmapSegment unpack_segment(uint16_t entry) {
  return {entry & 1023, entry >> 10 & 15, (entry >> 14 & 1) != 0};
}

// Whether an encoder can have written the entry of a segment of `bits` bits.
GZ_HD constexpr bool valid_segment(uint16_t entry, int bits) {
  return entry >> 15 == 0 && unpack_segment(entry).nbytes <= (bits + 7) / 8;
}

// A stream to decode, which may be any bytes, and the bitmap that it is decoded to.
struct BitmapStream {
  const uint8_t* bytes;
  int64_t nbytes;
  int64_t set;  // bits set in the bitmap
  uint8_t* bitmap;
  int64_t n, segment;  // as below
};
static_assert(sizeof(BitmapStream) == 48, "gradzip/ops/bitmap_code.py writes it");

// A bitmap of n bits to encode, in segments of so many, and where the stream and its size go.
struct BitmapSource {
  const uint8_t* bitmap;
  int64_t n, segment;
  uint8_t* out;
  int64_t* nbytes;
};
static_assert(sizeof(BitmapSource) == 40, "gradzip/ops/bitmap_code.py writes it");

// The best k for `count` > 0 of `bits` bits, set independently with a probability of p: the smallest with
// (1 - p)^(2^k) <= 0.618, because a step from k to k + 1 adds a bit per code and halves the zeros.
// -log(1 - p) is about p / (1 - p / 2), and -log(0.618) about 13 / 27.
GZ_HD constexpr int bitmap_low_bits(int count, int bits) {
  int k = 0;
  while ((54 * count) << k < 13 * (2 * bits - count)) ++k;
  return k;
}

}  // namespace gradzip
