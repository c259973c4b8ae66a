#include "cuda/ternary.cuh"

#include "cuda/block/launch.h"
#include "cuda/block/table.h"
#include "cuda/ops.h"

namespace gradzip::cuda {

int64_t ternary_packed(void* workspace, const TernarySource* table, int64_t count, const int64_t* replays,
                       cudaStream_t stream) {
  std::vector<TernaryEntry> entries;
  int64_t blocks = 0;
  for (int64_t i = 0; i < count; ++i) {
    entries.push_back({table[i], blocks});
    blocks += ceil_div(table[i].n, kTritTile);
  }
  Arena arena(workspace);
  const auto* on_device = upload(arena, entries, stream);
  if (!workspace) return arena.nbytes();
  if (blocks > 0)
    launch(stream, grid_of(unsigned(blocks)), kBlock, kernel<ternary_packed_kernel>, on_device, count, replays);
  return 0;
}

int64_t ternary_decode_add(void* workspace, const WeightedSum* table, int64_t count, const TernaryTerm* terms,
                           int32_t* failed, cudaStream_t stream) {
  return launch_sums(workspace, table, count, terms, kTritTile, stream, kernel<ternary_decode_add_kernel>, failed);
}

}  // namespace gradzip::cuda
