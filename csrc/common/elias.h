// Elias' gamma code in the layout of csrc/kernels.h.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace gradzip {

constexpr int64_t kEliasChunk = 1 << 12;  // elements
constexpr int32_t kEliasTop = 65535;      // so that a token has at most 57 bits, which one read or write covers

struct EliasCode {
  uint64_t bits;
  int length;
};

// gamma(v), first bit lowest: k = floor(log2 v) zeros, a one, and the k bits below the top one of v.
GZ_HD constexpr EliasCode gamma_code(uint32_t v, int k) {
  return {uint64_t(1) << k | uint64_t(v ^ (1u << k)) << (k + 1), 2 * k + 1};
}

// A stream of coded levels, and the norms of its buckets.
struct EliasTerm {
  const uint8_t* bytes;
  int64_t nbytes;
  const float* norms;
};
static_assert(sizeof(EliasTerm) == 24, "gradzip/ops/groups.py writes it");

// A nonzero level: gamma of the zeros before it + 1, its sign, gamma of its magnitude.
GZ_HD constexpr EliasCode level_token(EliasCode run, bool negative, EliasCode size) {
  return {run.bits | (uint64_t(negative) | size.bits << 1) << run.length, run.length + 1 + size.length};
}

}  // namespace gradzip
