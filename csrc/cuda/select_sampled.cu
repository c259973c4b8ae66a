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

int64_t select_sampled(void* workspace, const SampledSource* table, int64_t count, cudaStream_t stream) {
  Arena arena(workspace);
  auto* states = arena.take<SampledState>(count);
  std::vector<SelectEntry> vectors;
  std::vector<SampledEntry> entries;
  for (int64_t i = 0; i < count; ++i) {
    const SampledSource& source = table[i];
    auto* state = workspace ? states + i : nullptr;
    auto* exact = arena.take<Selection>(1);
    vectors.push_back({source.x, source.n, source.k, workspace ? &state->exact : nullptr, exact, {}});
    entries.push_back({source, state, exact, nullptr, first_sample(source.n, source.k), 0, 0});
  }
  Arena later = arena;  // what exact selections take is where the samples were
  for (SampledEntry& entry : entries) entry.sample = arena.take<float>(largest_sample(entry.source.n, entry.source.k));
  const SelectLaunch passes(later, std::move(vectors));
  if (!workspace) return std::max(arena.nbytes(), later.nbytes());
  clear(states, count * int64_t(sizeof *states), stream);
  for (int round = 0; round < kSampleRounds; ++round) {
    std::vector<SampledEntry> paying;
    for (SampledEntry& entry : entries) {
      const auto& [x, n, k, key, selection, found] = entry.source;
      entry.rank = sampled_rank(n, k, entry.size);
      if (sample_pays(entry.size, n)) paying.push_back(entry);
      entry.counter += uint64_t(entry.size) / 4;
      entry.size *= 4;
    }
    for_each_batch(paying, [&](const Batch<SampledEntry>& batch, unsigned some) {
      int64_t size = 0, longest = 0;
      for (unsigned i = 0; i < some; ++i) {
        size = std::max(size, batch.of[i].size);
        longest = std::max(longest, batch.of[i].source.n);
      }
      launch(stream, grid_of(grid_for_each(some, ceil_div(size, 4 * kSelectBlock), 4), some), kSelectBlock,
             kernel<sample_kernel>, batch, round);
      launch(stream, grid_of(grid_for_each(some, ceil_div(longest, 16 * kBlock)), some), kBlock,
             kernel<sample_count_kernel>, batch, round);
    });
  }
  passes.launch_on(stream);
  for_each_batch(entries, [&](const Batch<SampledEntry>& batch, unsigned some) {
    launch(stream, grid_of(1, some), kLanes, kernel<sample_finish_kernel>, batch);
  });
  return 0;
}

}  // namespace gradzip::cuda
