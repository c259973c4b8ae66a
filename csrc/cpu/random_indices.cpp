#include "common/random_indices.h"

#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/philox.h"

namespace gradzip::cpu {

void random_indices(int64_t n, int64_t k, uint64_t key, const int64_t* replays, int32_t* indices, int threads) {
  if (k == 0) return;
  key = replay_key(key, replays);
  const Shift shift(n, k, key);
  const int64_t quotient = n / k, remainder = n % k;
  parallel_chunks(k, kChunk, threads, [&](int64_t, int64_t begin, int64_t end) {
    constexpr int64_t kWords = 1024;
    uint32_t words[kWords];
    Stratum stratum(begin, n, k);
    for (int64_t i = begin; i < end; ++i, stratum.next(quotient, remainder, k)) {
      const int64_t word = (i - begin) % kWords;
      if (word == 0) philox_words(key, uint64_t(i), int(end - i < kWords ? end - i : kWords), words);
      indices[shift.place(i, k)] = shift.index(i, stratum.draw(words[word]), n);
    }
  });
}

}  // namespace gradzip::cpu
