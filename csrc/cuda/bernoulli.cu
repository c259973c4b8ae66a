#include "cuda/bernoulli.cuh"

#include "cuda/block/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {

void bernoulli(const float* p, int64_t n, uint64_t key, uint8_t* bitmap, cudaStream_t stream) {
  launch(stream, grid_of(grid_for(ceil_div(n, kTile))), kBlock, kernel<bernoulli_kernel>, p, n, key, bitmap);
}

}  // namespace gradzip::cuda
