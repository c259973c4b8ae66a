#include "cuda/one_bit.cuh"

#include "cuda/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {

int64_t one_bit_packed(void* workspace, const float* x, int64_t rows, int64_t columns, uint64_t key, uint8_t* packed,
                       float* means, cudaStream_t stream) {
  if (rows * columns == 0) {
    clear(means, 2 * rows * int64_t(sizeof(float)), stream);
    return 0;
  }
  const int64_t segments = ceil_div(columns, kSumSegment);
  Arena arena(workspace);
  auto* parts = arena.take<Sides>(segments > 1 ? rows * segments : 0);
  if (!workspace) return arena.nbytes();
  signs_pack(x, rows * columns, key, packed, stream);
  launch(stream, grid_of(grid_for(ceil_div(rows * segments, kBlock / kTeam))), kBlock, side_sums_kernel, x, rows,
         columns, segments, packed, parts, means);
  if (segments > 1)
    launch(stream, grid_of(grid_for(ceil_div(rows, kBlock / kLanes))), kBlock, combine_sides_kernel, parts, rows,
           columns, segments, means);
  return 0;
}

void one_bit_decode_add(const uint8_t* packed, const float* means, int64_t rows, int64_t columns, float weight,
                        float* out, int32_t* failed, cudaStream_t stream) {
  const int64_t n = rows * columns;
  if (n == 0) return;
  launch(stream, grid_of(grid_for(ceil_div(n, kMostTile))), kBlock, one_bit_decode_add_kernel, packed, means, n,
         columns, weight, out, failed);
}

}  // namespace gradzip::cuda
