// Tables of the kernels for signs, with an entry for each tensor, and what is computed of their magnitudes.
#pragma once

#include <cstdint>

#include "common/quantize.h"

namespace gradzip {

// A tensor whose signs are packed, of the type `dtype` (common/half.h).
struct SignsSource {
  const void* x;
  int64_t dtype, n;
  uint64_t key;
  uint8_t* packed;
};
static_assert(sizeof(SignsSource) == 40, "gradzip/ops/signs.py writes it");

// A vote on n signs.
struct SignsVote {
  int64_t n;
  uint64_t key;
  uint8_t* packed;
};
static_assert(sizeof(SignsVote) == 24, "gradzip/ops/signs.py writes it");

// float(weight * *scale), negated where the bit is set. A null scale is 1.
struct SignsTerm {
  const uint8_t* packed;
  const float* scale;
  double weight;
};
static_assert(sizeof(SignsTerm) == 24, "gradzip/ops/signs.py writes it");

GZ_HD float signs_value(const SignsTerm& term) {
  return float(term.scale ? term.weight * double(*term.scale) : term.weight);
}

// Of one segment (common/sums.h), or of all: the sum of the finite magnitudes, and the bits of the largest one.
struct SignsPart {
  double total;
  uint32_t most;
};

// max |x| and mean |x|, infinite if the sum overflows.
GZ_HD void signs_statistics(const SignsPart& all, int64_t n, float* statistics) {
  const float total = norm_value(all.total);
  statistics[0] = bits_float(all.most);
  const bool finite = float_bits(total) < kMaxFiniteBits;
  statistics[1] = n == 0 ? 0.0f : finite ? float(double(total) / double(n)) : bits_float(kInfBits);
}

}  // namespace gradzip
