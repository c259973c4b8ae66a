#include "cuda/atom_probabilities.cuh"

#include "cuda/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {
namespace {

struct WaterSpace {
  WaterState* state;
  Split* parts;

  WaterSpace(Arena& arena, int64_t n)
      : state(arena.take<WaterState>(1)), parts(arena.take<Split>(ceil_div(n, kSplitSegment))) {}
};

int64_t water_nbytes(int64_t n) {
  Arena arena(nullptr);
  WaterSpace(arena, n);
  return arena.used();
}

template <class T>
void probabilities(const T* atoms, int64_t n, double budget, T* p, void* workspace, cudaStream_t stream) {
  Arena arena(workspace);
  const WaterSpace space(arena, n);
  clear(space.state, sizeof *space.state, stream);
  // The first round looks at what there is. More than those of Newton's method are hardly ever needed.
  const int64_t blocks = ceil_div(n, kSplitSegment * kBlockTeams);
  for (int round = 0; blocks > 1 && round <= kNewtonRounds; ++round)
    launch(stream, grid_of(grid_for(blocks)), kBlock, split_atoms_kernel<T>, atoms, n, budget, space.parts,
           space.state);
  launch(stream, grid_of(1), kBlock, split_atoms_kernel<T>, atoms, n, budget, space.parts, space.state);
  launch(stream, grid_of(grid_for(ceil_div(n, 4 * kBlock))), kBlock, atom_probabilities_kernel<T>, atoms, n,
         space.state, p);
}

}  // namespace

int64_t atom_probabilities_float_workspace(int64_t n) { return water_nbytes(n); }

void atom_probabilities_float(const float* atoms, int64_t n, double budget, float* p, void* workspace,
                              cudaStream_t stream) {
  probabilities(atoms, n, budget, p, workspace, stream);
}

int64_t atom_probabilities_double_workspace(int64_t n) { return water_nbytes(n); }

void atom_probabilities_double(const double* atoms, int64_t n, double budget, double* p, void* workspace,
                               cudaStream_t stream) {
  probabilities(atoms, n, budget, p, workspace, stream);
}

}  // namespace gradzip::cuda
