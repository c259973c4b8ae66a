#include "cuda/select_sampled.cuh"

#include "cuda/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {
namespace {

int64_t largest_sample(int64_t n, int64_t k) {
  int64_t largest = 0, size = first_sample(n, k);
  for (int round = 0; round < kSampleRounds && sample_pays(size, n); ++round, size *= 4) largest = size;
  return largest;
}

struct SampledSpace {
  SampledState* state;
  Selection* exact;
  float* sample;

  SampledSpace(Arena& arena, int64_t n, int64_t k)
      : state(arena.take<SampledState>(1)),
        exact(arena.take<Selection>(1)),
        sample(arena.take<float>(largest_sample(n, k))) {}
};

}  // namespace

int64_t select_sampled_workspace(int64_t n, int64_t k) {
  Arena arena(nullptr);
  SampledSpace(arena, n, k);
  return arena.used();
}

void select_sampled(const float* x, int64_t n, int64_t k, uint64_t key, Selection* selection, int64_t* count,
                    void* workspace, cudaStream_t stream) {
  Arena arena(workspace);
  const SampledSpace space(arena, n, k);
  clear(space.state, sizeof *space.state, stream);
  uint64_t counter = 0;
  int64_t size = first_sample(n, k);
  for (int round = 0; round < kSampleRounds && sample_pays(size, n); ++round, size *= 4) {
    launch(stream, grid_of(grid_for(ceil_div(size, 4 * kSelectBlock), 4)), kSelectBlock, sample_kernel, x, n, size,
           sampled_rank(n, k, size), key, counter, round, space.sample, space.state);
    launch(stream, grid_of(grid_for(ceil_div(n, 16 * kBlock))), kBlock, sample_count_kernel, x, n, k, round,
           space.state, selection, count);
    counter += uint64_t(size) / 4;
  }
  const dim3 grid = grid_of(grid_for(ceil_div(n, 1 << 14), 4));
  SelectState* exact = &space.state->exact;
  launch(stream, grid, kSelectBlock, select_kernel<0>, x, n, k, exact, space.exact);
  launch(stream, grid, kSelectBlock, select_kernel<1>, x, n, k, exact, space.exact);
  launch(stream, grid, kSelectBlock, select_kernel<2>, x, n, k, exact, space.exact);
  launch(stream, grid_of(1), kLanes, sample_finish_kernel, n, k, space.state, space.exact, selection, count);
}

}  // namespace gradzip::cuda
