#include "cuda/random_indices.cuh"

#include "cuda/block/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {

void random_indices(int64_t n, int64_t k, uint64_t key, const int64_t* replays, int32_t* indices, cudaStream_t stream) {
  if (k == 0) return;
  launch(stream, grid_of(grid_for(ceil_div(k, 4 * kBlock))), kBlock, kernel<random_indices_kernel>, n, k, n / k, n % k,
         key, replays, Shift(n, k, key), indices);
}

}  // namespace gradzip::cuda
