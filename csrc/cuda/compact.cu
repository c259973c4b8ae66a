#include "cuda/compact.cuh"

#include "cuda/block/bitmap_tiles.h"
#include "cuda/block/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {
namespace {

// CUDA's load functions take its own 64-bit type.
using Item8 = unsigned long long;

template <class T>
void compact_items(const void* values, int64_t n, const uint8_t* bitmap, void* out, int64_t capacity,
                   const BitmapOffsets& tiles, cudaStream_t stream) {
  launch(stream, grid_of(tiles.grid()), kBlock, kernel<compact_kernel<T>>, static_cast<const T*>(values), n, bitmap,
         tiles.offsets, static_cast<T*>(out), capacity);
}

template <class T>
void expand_items(const void* values, int64_t count, const uint8_t* bitmap, void* out, int64_t n,
                  const BitmapOffsets& tiles, cudaStream_t stream) {
  launch(stream, grid_of(tiles.grid()), kBlock, kernel<expand_kernel<T>>, static_cast<const T*>(values), count, bitmap,
         tiles.offsets, static_cast<T*>(out), n);
}

}  // namespace

int64_t compact(void* workspace, const void* values, int64_t n, int item_size, const uint8_t* bitmap, void* out,
                int64_t capacity, int64_t* found, cudaStream_t stream) {
  Arena arena(workspace);
  const BitmapOffsets tiles(arena, n);
  if (!workspace) return arena.nbytes();
  tiles.count(bitmap, n, found, stream);
  (item_size == 4 ? compact_items<uint32_t> : compact_items<Item8>)(values, n, bitmap, out, capacity, tiles, stream);
  return 0;
}

int64_t compact_expand(void* workspace, const void* values, int64_t count, int item_size, const uint8_t* bitmap,
                       void* out, int64_t n, int64_t* found, cudaStream_t stream) {
  Arena arena(workspace);
  const BitmapOffsets tiles(arena, n);
  if (!workspace) return arena.nbytes();
  tiles.count(bitmap, n, found, stream);
  (item_size == 4 ? expand_items<uint32_t> : expand_items<Item8>)(values, count, bitmap, out, n, tiles, stream);
  return 0;
}

}  // namespace gradzip::cuda
