// Ascending indices on the wire, little-endian: a header, then the smaller of a status bitmap (bit i % 8 of byte i / 8)
// and Rice-coded gaps in blocks of kIndexBlock indices.
//
// Coded gaps: a table with one entry per block, then the blocks. A block is one byte k <= 31, the low k bits of every
// gap (a bit stream, padded to a byte), and the high part of every gap in unary: that many 0 bits, then a 1. The gap of
// an index is the number of elements between it and the previous index, or the end of the previous block. The table
// holds the end of each block, as an index and in bytes, so blocks are read and written independently.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace gradzip {

struct IndexHeader {
  uint32_t coded;  // 0: bitmap, 1: coded gaps
  uint32_t count;  // number of indices
  uint32_t nbytes;  // header included
};
static_assert(sizeof(IndexHeader) == 12, "the wire format");

// Whether `nbytes` bytes may begin with a stream that claims so many. A reader may know only what room a stream has.
GZ_HD bool index_stream_fits(uint32_t claimed, int64_t nbytes) {
  return claimed >= sizeof(IndexHeader) && claimed <= nbytes;
}

struct IndexBlock {
  uint32_t end;  // the block's last index + 1
  uint32_t end_byte;  // of the block, counted from the end of the table
};
static_assert(sizeof(IndexBlock) == 8, "the wire format");

constexpr int64_t kIndexBlock = 2048;

// Indices to encode, and where the stream and its size go.
struct IndexSource {
  const int32_t* indices;
  int64_t count, numel;
  uint8_t* out;
  int64_t capacity;
  int64_t* nbytes;
};
static_assert(sizeof(IndexSource) == 48, "gradzip/ops/index_code.py writes it");

// A stream to decode, which may be any bytes, and where its `count` indices go.
struct IndexStream {
  const uint8_t* bytes;
  int64_t nbytes, numel, count;
  int32_t* indices;
};
static_assert(sizeof(IndexStream) == 40, "gradzip/ops/index_code.py writes it");

// A sparse tensor in a weighted sum (common/weighted_sum.h): `count` values, and the stream of their indices.
struct IndexTerm {
  const uint8_t* stream;
  int64_t nbytes;
  const float* values;
  int64_t count;
  double weight;  // rounded to float
};
static_assert(sizeof(IndexTerm) == 40, "gradzip/ops/index_code.py writes it");

// The smallest k to try for a block of `count` > 0 gaps with sum `span`: this one and the next two are tried, and the
// first that makes the block shortest is used. The optimum is about log2(mean gap * ln 2).
GZ_HD int index_low_bits(int64_t count, int64_t span) {
  int middle = 0;
  while (middle < 30 && (count << (middle + 1)) * 13 <= span * 9) ++middle;
  return middle > 0 ? middle - 1 : 0;
}

// Bytes of a block of gaps; `above` is the sum of their high parts, gap >> k.
GZ_HD int64_t index_block_nbytes(int64_t count, int k, int64_t above) {
  return 1 + (count * k + 7) / 8 + (count + above + 7) / 8;
}

}  // namespace gradzip
