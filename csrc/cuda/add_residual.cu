#include "cuda/add_residual.cuh"

#include "cuda/block/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {

void add_residual(const ResidualSum* table, int64_t count, cudaStream_t stream) {
  for (int64_t at = 0; at < count;) {
    AddTable batch{};
    int64_t blocks = 0;
    for (; at < count && batch.count < kAddBatch; ++at) {
      if (table[at].n == 0) continue;
      batch.entries[batch.count++] = {table[at], uint32_t(blocks)};
      blocks += ceil_div(table[at].n, kAddTile);
    }
    if (blocks > 0) launch(stream, grid_of(unsigned(blocks)), kBlock, kernel<add_residual_kernel>, batch);
  }
}

}  // namespace gradzip::cuda
