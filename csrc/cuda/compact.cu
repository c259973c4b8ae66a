#include "cuda/compact.cuh"

#include "cuda/bitmap.h"
#include "cuda/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {
namespace {

// 64 bits as CUDA's own functions name them.
using Item8 = unsigned long long;

template <class T>
void compact_items(const void* values, int64_t n, const uint8_t* bitmap, void* out, int64_t capacity,
                   const BitmapOffsets& tiles, cudaStream_t stream) {
  launch(stream, grid_of(tiles.grid()), kBlock, compact_kernel<T>, static_cast<const T*>(values), n, bitmap,
         tiles.offsets, static_cast<T*>(out), capacity);
}

template <class T>
void expand_items(const void* values, int64_t count, const uint8_t* bitmap, void* out, int64_t n,
                  const BitmapOffsets& tiles, cudaStream_t stream) {
  launch(stream, grid_of(tiles.grid()), kBlock, expand_kernel<T>, static_cast<const T*>(values), count, bitmap,
         tiles.offsets, static_cast<T*>(out), n);
}

int64_t offsets_nbytes(int64_t n) {
  Arena arena(nullptr);
  BitmapOffsets tiles(arena, n);
  return arena.used();
}

}  // namespace

int64_t bitmap_workspace(int64_t n) { return offsets_nbytes(n) + 16; }

void bitmap(const float* x, int64_t n, const Selection* selection, uint8_t* bitmap, int64_t* set, void* workspace,
            cudaStream_t stream) {
  Arena arena(workspace);
  const BitmapOffsets tiles(arena, n);
  auto* ties = arena.take<int64_t>(1);
  clear(set, sizeof *set, stream);
  launch(stream, grid_of(tiles.grid()), kBlock, mark_kernel, x, n, selection, bitmap, tiles.counts, set);
  tiles.scan(ties, stream);
  launch(stream, grid_of(tiles.grid()), kBlock, drop_ties_kernel, x, n, selection, tiles.counts, tiles.offsets, bitmap,
         set);
}

int64_t compact_workspace(int64_t n) { return offsets_nbytes(n); }
int64_t expand_workspace(int64_t n) { return offsets_nbytes(n); }

void compact(const void* values, int64_t n, int item_size, const uint8_t* bitmap, void* out, int64_t capacity,
             int64_t* set, void* workspace, cudaStream_t stream) {
  Arena arena(workspace);
  const BitmapOffsets tiles(arena, n);
  tiles.count(bitmap, n, set, stream);
  (item_size == 4 ? compact_items<uint32_t> : compact_items<Item8>)(values, n, bitmap, out, capacity, tiles, stream);
}

void expand(const void* values, int64_t count, int item_size, const uint8_t* bitmap, void* out, int64_t n, int64_t* set,
            void* workspace, cudaStream_t stream) {
  Arena arena(workspace);
  const BitmapOffsets tiles(arena, n);
  tiles.count(bitmap, n, set, stream);
  (item_size == 4 ? expand_items<uint32_t> : expand_items<Item8>)(values, count, bitmap, out, n, tiles, stream);
}

}  // namespace gradzip::cuda
