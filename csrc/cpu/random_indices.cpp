// k of n at random, ascending, without a sort: one of each of k strata, which are shifted by a random number of elements
// (around the end), so that every element is as likely to be taken, k / n, whether k divides n or not.
#include <algorithm>
#include <vector>

#include "common/philox.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/philox.h"

namespace gradzip::cpu {
namespace {

// word / 2^32 of the way from begin to end.
int64_t between(uint32_t word, int64_t begin, int64_t end) {
  return begin + int64_t((uint64_t(word) * uint64_t(end - begin)) >> 32);
}

uint32_t draw(uint64_t key, int64_t i) { return philox(key, uint64_t(i) / 4).v[i % 4]; }

}  // namespace

void random_indices(int64_t n, int64_t k, uint64_t key, int32_t* indices, int threads) {
  if (k == 0) return;
  const auto stratum = [=](int64_t i) { return i * n / k; };  // n, k < 2^31
  const int64_t shift = between(draw(key, k), 0, n);
  // The strata from `wrapped` on are shifted past the end, to come first.
  int64_t wrapped = 0, over = k;
  while (wrapped < over) {
    const int64_t middle = (wrapped + over) / 2;
    if (between(draw(key, middle), stratum(middle), stratum(middle + 1)) + shift < n)
      wrapped = middle + 1;
    else
      over = middle;
  }
  parallel_chunks(k, kChunk, threads, [&](int64_t, int64_t begin, int64_t end) {
    std::vector<uint32_t> words(size_t(end - begin));
    philox_words(key, uint64_t(begin), int(end - begin), words.data());
    for (int64_t i = begin; i < end; ++i) {
      const int64_t at = between(words[size_t(i - begin)], stratum(i), stratum(i + 1)) + shift;
      if (i < wrapped)
        indices[k - wrapped + i] = int32_t(at);
      else
        indices[i - wrapped] = int32_t(at - n);
    }
  });
}

}  // namespace gradzip::cpu
