// The launches of an exact selection, for launchers that share its kernels.
#pragma once

#include "cuda/block/launch.h"
#include "cuda/select.cuh"

namespace gradzip::cuda {
namespace {

struct SelectLaunch {
  dim3 grid;
  SelectCandidates candidates;

  // A block's counters have 32 bits; clearing and summing them costs as much as reading several thousand values. There
  // is room for an eighth of the values: a few percent of a gradient share the leading 11 bits of the k-th largest.
  SelectLaunch(int64_t n, Arena& arena) : grid(grid_of(grid_for(ceil_div(n, 1 << 14), 4))) {
    candidates.room = ceil_div(n, 8 * int64_t(grid.x));
    candidates.magnitudes = arena.take<uint32_t>(candidates.room * grid.x);
    candidates.counts = arena.take<uint32_t>(grid.x);
  }

  // state: zero.
  void launch_on(cudaStream_t stream, const float* x, int64_t n, int64_t k, SelectState* state,
                 Selection* selection) const {
    launch(stream, grid, kSelectBlock, kernel<select_kernel<0>>, x, n, k, state, selection, candidates);
    launch(stream, grid, kSelectBlock, kernel<select_kernel<1>>, x, n, k, state, selection, candidates);
    launch(stream, grid, kSelectBlock, kernel<select_kernel<2>>, x, n, k, state, selection, candidates);
  }
};

}  // namespace
}  // namespace gradzip::cuda
