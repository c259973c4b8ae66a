#include "cuda/bitmap.cuh"

#include "cuda/block/bitmap_tiles.h"
#include "cuda/block/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {

int64_t bitmap(void* workspace, const float* x, int64_t n, const Selection* selection, uint8_t* bitmap, int64_t* count,
               cudaStream_t stream) {
  Arena arena(workspace);
  const BitmapOffsets tiles(arena, n);
  auto* ties = arena.take<int64_t>(1);
  if (!workspace) return arena.nbytes();
  clear(count, sizeof *count, stream);
  launch(stream, grid_of(tiles.grid()), kBlock, kernel<mark_kernel>, x, n, selection, bitmap, tiles.counts, count);
  tiles.scan(ties, stream);
  launch(stream, grid_of(tiles.grid()), kBlock, kernel<drop_ties_kernel>, x, n, selection, tiles.counts, tiles.offsets,
         bitmap, count);
  return 0;
}

int64_t bitmap_count(void* workspace, const uint8_t* bitmap, int64_t n, int64_t* count, cudaStream_t stream) {
  Arena arena(workspace);
  const BitmapOffsets tiles(arena, n);
  if (!workspace) return arena.nbytes();
  tiles.count(bitmap, n, count, stream);
  return 0;
}

int64_t bitmap_indices(void* workspace, const uint8_t* bitmap, int64_t n, int64_t count, int32_t* indices,
                       int64_t* found, cudaStream_t stream) {
  Arena arena(workspace);
  const BitmapOffsets tiles(arena, n);
  if (!workspace) return arena.nbytes();
  tiles.count(bitmap, n, found, stream);
  launch(stream, grid_of(tiles.grid()), kBlock, kernel<bitmap_indices_kernel>, bitmap, n, tiles.offsets, count,
         indices);
  return 0;
}

}  // namespace gradzip::cuda
