// Ascending indices on the wire, little-endian: a header, then the smaller of a status bitmap (bit i % 8 of byte i / 8)
// and Rice-coded gaps in blocks of kIndexBlock indices.
//
// Coded gaps: a table with one entry per block, then the blocks. A block is one byte k <= 31, the low k bits of every gap
// (a bit stream, padded to a byte), and in unary what the gaps are above: as many 0 bits, then a 1. The gap of an index
// is what lies between it and the one before it, or between it and the start of its block: the end of the block before.
// Every block says where it ends, in indices and in bytes, so blocks are read and written independently.
#pragma once

#include <cstdint>

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

}  // namespace gradzip
