#include "cuda/select_sampled.cuh"

#include "cuda/ops.h"
#include "cuda/select_launch.h"

namespace gradzip::cuda {
namespace {

int64_t largest_sample(int64_t n, int64_t k) {
  int64_t largest = 0, size = first_sample(n, k);
  for (int round = 0; round < kSampleRounds && sample_pays(size, n); ++round, size *= 4) largest = size;
  return largest;
}

}  // namespace

int64_t select_sampled(void* workspace, const float* x, int64_t n, int64_t k, uint64_t key, Selection* selection,
                       int64_t* count, cudaStream_t stream) {
  Arena arena(workspace);
  auto* state = arena.take<SampledState>(1);
  auto* exact = arena.take<Selection>(1);
  auto* sample = arena.take<float>(largest_sample(n, k));
  const SelectLaunch passes(arena, {{x, n, k, workspace ? &state->exact : nullptr, exact, {}}});
  if (!workspace) return arena.nbytes();
  clear(state, sizeof *state, stream);
  uint64_t counter = 0;
  int64_t size = first_sample(n, k);
  for (int round = 0; round < kSampleRounds && sample_pays(size, n); ++round, size *= 4) {
    launch(stream, grid_of(grid_for(ceil_div(size, 4 * kSelectBlock), 4)), kSelectBlock, kernel<sample_kernel>, x, n,
           size, sampled_rank(n, k, size), key, counter, round, sample, state);
    launch(stream, grid_of(grid_for(ceil_div(n, 16 * kBlock))), kBlock, kernel<sample_count_kernel>, x, n, k, round,
           state, selection, count);
    counter += uint64_t(size) / 4;
  }
  passes.launch_on(stream);
  launch(stream, grid_of(1), kLanes, kernel<sample_finish_kernel>, n, k, state, exact, selection, count);
  return 0;
}

}  // namespace gradzip::cuda
