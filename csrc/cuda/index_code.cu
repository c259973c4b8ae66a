#include "cuda/index_code.cuh"

#include "cuda/block/bitmap_tiles.h"
#include "cuda/block/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {
namespace {

struct IndexPlan {
  uint32_t* nbytes;
  uint8_t* ks;
  int64_t *offsets, *total;
  uint32_t* unsound;

  IndexPlan(Arena& arena, int64_t count)
      : nbytes(arena.take<uint32_t>(index_blocks(count))),
        ks(arena.take<uint8_t>(index_blocks(count))),
        offsets(arena.take<int64_t>(index_blocks(count) + 1)),
        total(arena.take<int64_t>(1)),
        unsound(arena.take<uint32_t>(1)) {}
};

// Computes the number of bits set before each tile, if the stream has a bitmap.
void count_tiles(const uint8_t* bytes, int64_t nbytes, int64_t numel, int64_t count, const BitmapOffsets& tiles,
                 int64_t* total, cudaStream_t stream) {
  launch(stream, grid_of(tiles.grid()), kBlock, kernel<index_count_kernel>, bytes, nbytes, numel, count, tiles.counts);
  tiles.scan(total, stream);
}

unsigned grid_of_indices(const BitmapOffsets& tiles, int64_t count) {
  return grid_for(index_blocks(count) > tiles.tiles ? index_blocks(count) : tiles.tiles);
}

}  // namespace

int64_t index_code_encode(void* workspace, const int32_t* indices, int64_t count, int64_t numel, uint8_t* out,
                          int64_t capacity, int64_t* nbytes, cudaStream_t stream) {
  Arena arena(workspace);
  const IndexPlan plan(arena, count);
  if (!workspace) return arena.nbytes();
  const int64_t blocks = index_blocks(count), tiles = ceil_div(numel, kTile);
  clear(plan.unsound, sizeof *plan.unsound, stream);
  launch(stream, grid_of(grid_for(blocks)), kBlock, kernel<index_plan_kernel>, indices, count, numel, plan.nbytes,
         plan.ks, plan.unsound);
  launch(stream, grid_of(1), kScanBlock, kernel<scan_counts_kernel>, plan.nbytes, blocks, plan.offsets, plan.total);
  launch(stream, grid_of(capacity > 0 ? grid_for(blocks > tiles ? blocks : tiles) : 1), kBlock,
         kernel<index_write_kernel>, indices, count, numel, plan.offsets, plan.ks, plan.unsound, out, capacity, nbytes);
  return 0;
}

int64_t index_code_decode(void* workspace, const uint8_t* bytes, int64_t nbytes, int64_t numel, int64_t count,
                          int32_t* indices, int32_t* failed, cudaStream_t stream) {
  Arena arena(workspace);
  const BitmapOffsets tiles(arena, numel);
  auto* total = arena.take<int64_t>(1);
  if (!workspace) return arena.nbytes();
  count_tiles(bytes, nbytes, numel, count, tiles, total, stream);
  launch(stream, grid_of(grid_of_indices(tiles, count)), kBlock, kernel<index_code_decode_kernel>, bytes, nbytes, numel,
         count, tiles.offsets, indices, failed);
  return 0;
}

int64_t index_code_decode_add(void* workspace, const uint8_t* bytes, int64_t nbytes, const float* values, int64_t count,
                              float weight, float* out, int64_t numel, int32_t* failed, cudaStream_t stream) {
  Arena arena(workspace);
  const BitmapOffsets tiles(arena, numel);
  auto* total = arena.take<int64_t>(1);
  auto* corrupt = arena.take<int32_t>(1);
  if (!workspace) return arena.nbytes();
  clear(corrupt, sizeof *corrupt, stream);
  count_tiles(bytes, nbytes, numel, count, tiles, total, stream);
  launch(stream, grid_of(grid_of_indices(tiles, count)), kBlock, kernel<index_code_decode_add_kernel>, bytes, nbytes,
         values, count, weight, out, numel, tiles.offsets, corrupt);
  launch(stream, grid_of(grid_for(ceil_div(numel, 16 * kBlock))), kBlock, kernel<spoil_kernel>, corrupt, out, numel,
         failed);
  return 0;
}

}  // namespace gradzip::cuda
