#include "cuda/marked_indices.cuh"

#include "cuda/bitmap.h"
#include "cuda/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {

int64_t count_marked_workspace(int64_t n) {
  Arena arena(nullptr);
  BitmapOffsets tiles(arena, n);
  return arena.used();
}

void count_marked(const uint8_t* bitmap, int64_t n, int64_t* set, void* workspace, cudaStream_t stream) {
  Arena arena(workspace);
  BitmapOffsets(arena, n).count(bitmap, n, set, stream);
}

int64_t marked_indices_workspace(int64_t n) { return count_marked_workspace(n); }

void marked_indices(const uint8_t* bitmap, int64_t n, const float* x, int64_t count, int32_t* indices, float* values,
                    int64_t* set, void* workspace, cudaStream_t stream) {
  Arena arena(workspace);
  const BitmapOffsets tiles(arena, n);
  tiles.count(bitmap, n, set, stream);
  launch(stream, grid_of(tiles.grid()), kBlock, marked_indices_kernel, bitmap, n, x, tiles.offsets, count, indices,
         values);
}

}  // namespace gradzip::cuda
