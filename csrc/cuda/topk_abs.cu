#include "cuda/topk_abs.cuh"

#include "cuda/block/table.h"
#include "cuda/ops.h"
#include "cuda/select_launch.h"

namespace gradzip::cuda {

int64_t topk_abs(void* workspace, const TopkSource* table, int64_t count, cudaStream_t stream) {
  Arena arena(workspace);
  auto* states = arena.take<TopkState>(count);
  std::vector<SelectEntry> vectors;
  std::vector<TopkEntry> entries;
  int64_t most = 0;  // tiles of a vector
  for (int64_t i = 0; i < count; ++i) {
    const TopkSource& source = table[i];
    const int64_t tiles = ceil_div(source.n, kTile);
    auto* state = workspace ? states + i : nullptr;
    entries.push_back({source, state, arena.take<SelectedTile>(tiles), arena.take<uint8_t>(tiles * kTile / 8)});
    if (!source.selection) {
      auto* selection = arena.take<Selection>(1);
      vectors.push_back({source.x, source.n, source.k, workspace ? &state->select : nullptr, selection, {}});
      entries.back().source.selection = selection;
    }
    most = std::max(most, tiles);
  }
  const SelectLaunch passes(arena, std::move(vectors));
  if (!workspace) return arena.nbytes();
  clear(states, count * int64_t(sizeof *states), stream);
  passes.launch_on(stream);
  for_each_batch(entries, [&](const Batch<TopkEntry>& batch, unsigned some) {
    const dim3 grid = grid_of(grid_for_each(some, most), some);
    launch(stream, grid, kBlock, kernel<topk_mark_kernel>, batch);
    launch(stream, grid, kBlock, kernel<topk_write_kernel>, batch);
  });
  return 0;
}

}  // namespace gradzip::cuda
