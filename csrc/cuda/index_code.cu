#include "cuda/index_code.cuh"

#include "cuda/bitmap.h"
#include "cuda/launch.h"
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

// The launches that lead from a stream to where each tile's bits begin, if it has a bitmap.
void count_tiles(const uint8_t* stream, int64_t nbytes, int64_t numel, int64_t count, const BitmapOffsets& tiles,
                 int64_t* total, cudaStream_t cuda_stream) {
  launch(cuda_stream, grid_of(tiles.grid()), kBlock, index_count_kernel, stream, nbytes, numel, count, tiles.counts);
  tiles.scan(total, cuda_stream);
}

unsigned grid_of_indices(const BitmapOffsets& tiles, int64_t count) {
  return grid_for(index_blocks(count) > tiles.tiles ? index_blocks(count) : tiles.tiles);
}

}  // namespace

int64_t encode_indices_workspace(int64_t count) {
  Arena arena(nullptr);
  IndexPlan(arena, count);
  return arena.used();
}

void encode_indices(const int32_t* indices, int64_t count, int64_t numel, uint8_t* out, int64_t capacity,
                    int64_t* nbytes, void* workspace, cudaStream_t stream) {
  Arena arena(workspace);
  const IndexPlan plan(arena, count);
  const int64_t blocks = index_blocks(count), tiles = ceil_div(numel, kTile);
  clear(plan.unsound, sizeof *plan.unsound, stream);
  launch(stream, grid_of(grid_for(blocks)), kBlock, index_plan_kernel, indices, count, numel, plan.nbytes, plan.ks,
         plan.unsound);
  launch(stream, grid_of(1), kScanBlock, scan_counts_kernel, plan.nbytes, blocks, plan.offsets, plan.total);
  launch(stream, grid_of(capacity > 0 ? grid_for(blocks > tiles ? blocks : tiles) : 1), kBlock, index_write_kernel,
         indices, count, numel, plan.offsets, plan.ks, plan.unsound, out, capacity, nbytes);
}

int64_t decode_indices_workspace(int64_t numel) {
  Arena arena(nullptr);
  BitmapOffsets tiles(arena, numel);
  return arena.used() + 16;
}

void decode_indices(const uint8_t* stream, int64_t nbytes, int64_t numel, int64_t count, int32_t* indices,
                    int32_t* failed, void* workspace, cudaStream_t cuda_stream) {
  Arena arena(workspace);
  const BitmapOffsets tiles(arena, numel);
  count_tiles(stream, nbytes, numel, count, tiles, arena.take<int64_t>(1), cuda_stream);
  launch(cuda_stream, grid_of(grid_of_indices(tiles, count)), kBlock, index_decode_kernel, stream, nbytes, numel, count,
         tiles.offsets, indices, failed);
}

int64_t sparse_decode_add_workspace(int64_t numel) { return decode_indices_workspace(numel) + 16; }

void sparse_decode_add(const uint8_t* stream, int64_t nbytes, const float* values, int64_t count, float weight,
                       float* out, int64_t numel, int32_t* failed, void* workspace, cudaStream_t cuda_stream) {
  Arena arena(workspace);
  const BitmapOffsets tiles(arena, numel);
  auto* total = arena.take<int64_t>(1);
  auto* corrupt = arena.take<int32_t>(1);
  clear(corrupt, sizeof *corrupt, cuda_stream);
  count_tiles(stream, nbytes, numel, count, tiles, total, cuda_stream);
  launch(cuda_stream, grid_of(grid_of_indices(tiles, count)), kBlock, sparse_decode_add_kernel, stream, nbytes, values,
         count, weight, out, numel, tiles.offsets, corrupt);
  launch(cuda_stream, grid_of(grid_for(ceil_div(numel, 16 * kBlock))), kBlock, sparse_spoil_kernel, corrupt, out, numel,
         failed);
}

}  // namespace gradzip::cuda
