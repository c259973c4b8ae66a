// Bits of a tile in words of shared memory, with their ranks.
#pragma once

#include "cuda/block/block.cuh"

namespace gradzip::cuda {

struct alignas(8) RankedWord {
  uint32_t word, before;  // the bits set in the words before it
};

// words[w] = f(w) and its rank, for w < kWords, by all kThreads threads of the block; returns the number of bits set.
// A thread calls f for consecutive words, which are its own. Readers need a barrier. Earlier readers of `words` are done
// when all threads call it.
template <int kWords, int kThreads, class F>
GZ_DEVICE uint32_t rank_words(RankedWord* words, F f) {
  __shared__ uint32_t partial[kLanes];
  constexpr int kPer = (kWords + kThreads - 1) / kThreads;
  const int first = kPer * int(threadIdx.x);
  uint32_t word[kPer], mine = 0, total;
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    word[j] = first + j < kWords ? f(first + j) : 0;
    mine += uint32_t(__popc(word[j]));
  }
  uint32_t before = block_scan(mine, partial, &total);
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    if (first + j < kWords) words[first + j] = {word[j], before};
    before += uint32_t(__popc(word[j]));
  }
  return total;
}

struct RankedBit {
  bool set;
  uint32_t rank;  // if it is set
};

GZ_DEVICE RankedBit ranked_bit(const RankedWord& from, int bit) {
  const uint32_t upto = from.word << (31 - bit);
  return {int32_t(upto) < 0, from.before + uint32_t(__popc(upto)) - 1};
}

}  // namespace gradzip::cuda
