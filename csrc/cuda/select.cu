#include "cuda/select.cuh"

#include "cuda/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {

int64_t select(void* workspace, const float* x, int64_t n, int64_t k, Selection* selection, cudaStream_t stream) {
  Arena arena(workspace);
  auto* state = arena.take<SelectState>(1);
  if (!workspace) return arena.nbytes();
  clear(state, sizeof *state, stream);
  // A block's counters have 32 bits; clearing and summing them costs as much as reading several thousand values.
  const dim3 grid = grid_of(grid_for(ceil_div(n, 1 << 14), 4));
  launch(stream, grid, kSelectBlock, select_kernel<0>, x, n, k, state, selection);
  launch(stream, grid, kSelectBlock, select_kernel<1>, x, n, k, state, selection);
  launch(stream, grid, kSelectBlock, select_kernel<2>, x, n, k, state, selection);
  return 0;
}

}  // namespace gradzip::cuda
