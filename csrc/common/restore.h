// Memory to overwrite if a number is not finite: a step that is skipped leaves tensors as they were before.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "common/range_float.h"

namespace gradzip {

// `nbytes` bytes at any addresses: those of `source`, or, if it is null, the 8 bytes of `pattern` again and again.
struct Restoration {
  void* target;
  const void* source;
  int64_t nbytes;
  uint64_t pattern;  // its lowest byte comes first
};
static_assert(sizeof(Restoration) == 32, "gradzip/ops/restore.py writes it");

GZ_HD bool restores(float number) { return (float_bits(number) & 0x7fffffffu) >= kInfBits; }

GZ_HD uint8_t pattern_byte(uint64_t pattern, int64_t i) { return uint8_t(pattern >> (8 * (i % 8))); }

}  // namespace gradzip
