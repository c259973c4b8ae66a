// k of n at random, ascending. A thread takes four strata at a time, as the generator makes draws.
#pragma once

#include "common/random_indices.h"
#include "cuda/block/block.cuh"

namespace gradzip::cuda {

// quotient = n / k, remainder = n % k. shift: of the key.
__global__ void __launch_bounds__(kBlock)
    random_indices_kernel(int64_t n, int64_t k, int64_t quotient, int64_t remainder, uint64_t key,
                          const int64_t* replays, Shift shift, int32_t* indices) {
  if (replays) {
    key = replay_key(key, replays);
    shift = Shift(n, k, key);
  }
  for (int64_t first = 4 * grid_thread(); first < k; first += 4 * grid_threads()) {
    const Philox4 draw = philox(key, uint64_t(first) / 4);
    Stratum stratum(first, n, k);
#pragma unroll
    for (int j = 0; j < 4; ++j, stratum.next(quotient, remainder, k)) {
      const int64_t i = first + j;
      if (i < k) indices[shift.place(i, k)] = shift.index(i, stratum.draw(draw.v[j]), n);
    }
  }
}

}  // namespace gradzip::cuda
