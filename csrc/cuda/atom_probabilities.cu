#include "cuda/atom_probabilities.cuh"

#include "cuda/block/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {
namespace {

template <class T>
int64_t probabilities(void* workspace, const T* atoms, int64_t n, double budget, T* p, int32_t* failed,
                      cudaStream_t stream) {
  Arena arena(workspace);
  auto* state = arena.take<WaterState>(1);
  auto* parts = arena.take<Split>(ceil_div(n, kSplitSegment));
  if (!workspace) return arena.nbytes();
  clear(state, sizeof *state, stream);
  // The first round measures the atoms. More rounds than those of Newton's method are hardly ever needed; the single
  // block below runs them.
  const int64_t blocks = ceil_div(n, kSplitSegment * kBlockTeams);
  for (int round = 0; blocks > 1 && round <= kNewtonRounds; ++round)
    launch(stream, grid_of(grid_for(blocks)), kBlock, kernel<split_atoms_kernel<T>>, atoms, n, budget, parts, state);
  launch(stream, grid_of(1), kBlock, kernel<split_atoms_kernel<T>>, atoms, n, budget, parts, state);
  launch(stream, grid_of(grid_for(ceil_div(n, 4 * kBlock))), kBlock, kernel<atom_probabilities_kernel<T>>, atoms, n,
         state, p, failed);
  return 0;
}

}  // namespace

int64_t atom_probabilities_float(void* workspace, const float* atoms, int64_t n, double budget, float* p,
                                 int32_t* failed, cudaStream_t stream) {
  return probabilities(workspace, atoms, n, budget, p, failed, stream);
}

int64_t atom_probabilities_double(void* workspace, const double* atoms, int64_t n, double budget, double* p,
                                  int32_t* failed, cudaStream_t stream) {
  return probabilities(workspace, atoms, n, budget, p, failed, stream);
}

}  // namespace gradzip::cuda
