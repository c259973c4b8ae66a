// k of n at random, ascending, without a sort: one index per stratum, all shifted by a random number, modulo n, so that
// every index has probability k / n even if k does not divide n. n, k < 2^31.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "common/philox.h"

namespace gradzip {

// Stratum i begins at floor(i n / k). Iterates over strata without a division each.
struct Stratum {
  int64_t begin, end;
  int64_t rest;  // end = ((i + 1) n - rest) / k

  GZ_HD Stratum(int64_t i, int64_t n, int64_t k) : begin(i * n / k), end((i + 1) * n / k), rest((i + 1) * n % k) {}

  // quotient = n / k, remainder = n % k.
  GZ_HD void next(int64_t quotient, int64_t remainder, int64_t k) {
    begin = end;
    end += quotient;
    rest += remainder;
    if (rest >= k) ++end, rest -= k;
  }
  GZ_HD int64_t draw(uint32_t word) const { return begin + int64_t((uint64_t(word) * uint64_t(end - begin)) >> 32); }
};

// The shift: draws of the strata from `wrapped` on pass the end, so they come first.
struct Shift {
  int64_t by, wrapped;

  GZ_HD Shift(int64_t n, int64_t k, uint64_t key) {
    const auto word = [key](int64_t i) { return philox(key, uint64_t(i) / 4).v[i % 4]; };
    by = int64_t((uint64_t(word(k)) * uint64_t(n)) >> 32);
    // Element n - by becomes the first. Only its stratum may have elements on both sides of the end.
    const int64_t i = ((n - by + 1) * k - 1) / n, last = i < k ? i : k - 1;
    wrapped = last + (Stratum(last, n, k).draw(word(last)) + by < n);
  }

  // The index drawn from stratum i, and its rank among all indices.
  GZ_HD int32_t index(int64_t i, int64_t drawn, int64_t n) const {
    return int32_t(i < wrapped ? drawn + by : drawn + by - n);
  }
  GZ_HD int64_t place(int64_t i, int64_t k) const { return i < wrapped ? k - wrapped + i : i - wrapped; }
};

}  // namespace gradzip
