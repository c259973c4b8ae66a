#include "cuda/abs_max.cuh"

#include "cuda/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {

void abs_max(const float* x, int64_t n, float* most, cudaStream_t stream) {
  clear(most, sizeof *most, stream);
  launch(stream, grid_of(grid_for(ceil_div(n, 16 * kBlock))), kBlock, abs_max_kernel, x, n,
         reinterpret_cast<uint32_t*>(most));
}

}  // namespace gradzip::cuda
