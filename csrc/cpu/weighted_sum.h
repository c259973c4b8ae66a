// Weighted sums of encoded tensors, on all threads.
#pragma once

#include <algorithm>
#include <vector>

#include "common/dtype.h"
#include "common/weighted_sum.h"
#include "cpu/half.h"
#include "cpu/parallel.h"

namespace gradzip::cpu {

// 1 + the index of the first term for which not valid(sum, term); 0 if there is none.
template <class Term, class F>
int32_t first_invalid(const WeightedSum* table, int64_t count, const Term* terms, F&& valid) {
  const Term* term = terms;
  for (int64_t i = 0; i < count; ++i)
    for (const Term* end = term + table[i].terms; term < end; ++term)
      if (!valid(table[i], *term)) return int32_t(term - terms) + 1;
  return 0;
}

// Elements that stay in the L1 cache while all terms are added to them, at most.
constexpr int64_t kSumBlock = 1 << 12;

// add(term, begin, end, sum) for the terms of each sum, in order, in chunks of `chunk` elements: adds elements [begin, end)
// of a term to `sum`, which begins with element `begin`, a multiple of `block` <= kSumBlock.
template <class Term, class F>
void add_terms(const WeightedSum* table, int64_t count, const Term* terms, int64_t chunk, int64_t block, int threads,
               F&& add) {
  std::vector<const Term*> first;
  for (int64_t i = 0; i < count; terms += table[i++].terms) first.push_back(terms);
  const auto chunks = [&](int64_t i) { return ceil_div(table[i].n, chunk); };
  parallel_table(count, threads, chunks, [&](int64_t i, int64_t task) {
    const WeightedSum& sum = table[i];
    const int64_t end = std::min(sum.n, (task + 1) * chunk);
    typed(sum.out, int(sum.dtype), [&](auto* out) {
      float buffer[kSumBlock];
      for (int64_t begin = task * chunk; begin < end; begin += block) {
        const int64_t stop = std::min(end, begin + block);
        float* const of_block = room_for(out + begin, buffer);
        if (!sum.add) std::fill_n(of_block, stop - begin, 0.0f);
        for (int64_t t = 0; t < sum.terms; ++t) add(first[size_t(i)][t], begin, stop, of_block);
        write(of_block, stop - begin, out + begin);
      }
    });
  });
}

}  // namespace gradzip::cpu
