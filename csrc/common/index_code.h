// Ascending indices on the wire, little-endian: a header, then the smaller of a status bitmap (bit i % 8 of byte i / 8)
// and Rice-coded gaps in blocks of kIndexBlock indices.
//
// Coded gaps: a table with one entry per block, then the blocks. A block is one byte k <= 31, the low k bits of every gap
// (a bit stream, padded to a byte), and in unary what the gaps are above: as many 0 bits, then a 1. The gap of an index
// is what lies between it and the one before it, or between it and the start of its block: the end of the block before.
// Every block says where it ends, in indices and in bytes, so blocks are read and written independently.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace gradzip {

struct IndexHeader {
  uint32_t coded;  // 0: bitmap, 1: coded gaps
  uint32_t count;  // of the indices
  uint32_t nbytes;  // with this header
};
static_assert(sizeof(IndexHeader) == 12, "the wire format");

struct IndexBlock {
  uint32_t end;  // the block's last index + 1
  uint32_t end_byte;  // of the block, counted from the end of the table
};
static_assert(sizeof(IndexBlock) == 8, "the wire format");

constexpr int64_t kIndexBlock = 2048;

// Which k a block of `count` > 0 gaps that add up to `span` tries: this one and the next two, the first of those that
// make it shortest being the best. They lie about log2 of (mean gap ln 2).
GZ_HD int index_low_bits(int64_t count, int64_t span) {
  int middle = 0;
  while (middle < 30 && (count << (middle + 1)) * 13 <= span * 9) ++middle;
  return middle > 0 ? middle - 1 : 0;
}

// Bytes of a block of gaps, `above` being the sum of what they are above their low k bits.
GZ_HD int64_t index_block_nbytes(int64_t count, int k, int64_t above) {
  return 1 + (count * k + 7) / 8 + (count + above + 7) / 8;
}

}  // namespace gradzip
