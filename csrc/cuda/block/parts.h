// Launches decoders of sums in parts (common/parts.h), whose terms are arguments of the launch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/parts.h"

namespace gradzip::cuda {

// f(batch, terms of each part, first part, number of parts, more) for all terms: those of several parts, or some of one,
// `more` of them after the first. Batch: terms as an array `of`.
template <class Batch, class Term, class F>
void for_parts(const Term* terms, int64_t count, int64_t parts, F f) {
  constexpr int64_t kMost = sizeof(Batch) / sizeof(Term);
  const int64_t together = count > kMost ? 1 : kMost / std::max<int64_t>(count, 1);
  for (int64_t part = 0; part < parts; part += together) {
    const int64_t number = std::min(parts - part, together);
    int64_t first = 0;
    do {
      Batch batch{};
      const int64_t some = std::min(count - first, kMost);
      std::copy_n(terms + part * count + first, number * some, batch.of);
      f(batch, some, part, unsigned(number), first > 0);
      first += some;
    } while (first < count);
  }
}

}  // namespace gradzip::cuda
