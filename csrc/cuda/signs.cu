#include "cuda/signs.cuh"

#include "cuda/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {

void signs_pack(const float* x, int64_t n, uint64_t key, uint8_t* packed, cudaStream_t stream) {
  launch(stream, grid_of(grid_for(ceil_div(n, kTile))), kBlock, signs_pack_kernel, x, n, key, packed);
}

int64_t signs_majority(void* workspace, const uint8_t* const* votes, int voters, int64_t n, uint64_t key,
                       uint8_t* packed, cudaStream_t stream) {
  Arena arena(workspace);
  auto* table = arena.take<const uint8_t*>(voters);
  if (!workspace) return arena.nbytes();
  for (int first = 0; first < voters; first += kVoteBatch) {
    VoteBatch batch{};
    batch.count = voters - first < kVoteBatch ? voters - first : kVoteBatch;
    for (int v = 0; v < batch.count; ++v) batch.of[v] = votes[first + v];
    launch(stream, grid_of(1), kVoteBatch, signs_table_kernel, batch, table + first);
  }
  const auto kernel = voters < 1 << 4   ? signs_majority_kernel<4>
                      : voters < 1 << 8 ? signs_majority_kernel<8>
                                        : signs_majority_kernel<16>;
  launch(stream, grid_of(grid_for(ceil_div(n, 32 * kBlock))), kBlock, kernel, table, voters, n, key, packed);
  return 0;
}

void signs_decode_add(const uint8_t* packed, int64_t n, float scale, float* out, cudaStream_t stream) {
  launch(stream, grid_of(grid_for(ceil_div(n, 4 * kBlock))), kBlock, signs_decode_add_kernel, packed, n, scale, out);
}

}  // namespace gradzip::cuda
