#include "cuda/transform.cuh"

#include "cuda/block/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {
namespace {

TransformLayout layout_of(uint32_t code, int64_t n) {
  TransformLayout t;
  if (!make_layout(code, n, &t)) throw std::invalid_argument("transform: not the code of a transform");
  return t;
}

dim3 tile_grid(const TransformLayout& t) { return grid_of(grid_for(t.tiles, kTransformBlocks)); }
dim3 warp_grid(int64_t tiles, int block) { return grid_of(grid_for(ceil_div(tiles, block / kLanes), 2048 / block)); }

}  // namespace

void transform(const float* x, int64_t n, uint32_t code, float* coefficients, cudaStream_t stream) {
  const TransformLayout t = layout_of(code, n);
  launch(stream, tile_grid(t), kTransformBlock, kernel<transform_kernel>, t, x, coefficients);
}

void transform_inverse(const float* coefficients, int64_t n, uint32_t code, float* x, cudaStream_t stream) {
  const TransformLayout t = layout_of(code, n);
  launch(stream, tile_grid(t), kTransformBlock, kernel<transform_inverse_kernel>, t, coefficients, x);
}

int64_t transform_select(void* workspace, const float* x, int64_t n, uint32_t code, int64_t k, float* scratch,
                         int64_t scratch_numel, uint8_t* bitmap, float* values, cudaStream_t stream) {
  TransformSelect s{};
  s.t = layout_of(code, n);
  s.k = k;
  const int64_t room = s.t.tiles * s.t.tile;
  Arena arena(workspace);
  s.state = arena.take<TransformSelectState>(1);
  s.selection = arena.take<Selection>(1);
  s.tiles = arena.take<TileSelection>(s.t.tiles);
  s.marks = arena.take<uint32_t>(room / s.t.group / 32);
  s.candidates = scratch_numel >= room ? scratch : arena.take<float>(room);
  auto* amax = arena.take<float>(1);
  s.amax = amax;
  if (!workspace) return arena.nbytes();
  clear(s.state, sizeof *s.state, stream);
  if (s.t.group == 2) abs_max(x, n, amax, stream);
  const dim3 by_tile = tile_grid(s.t), by_warp = warp_grid(s.t.tiles, kTransformBlock);
  launch(stream, by_tile, kTransformBlock, kernel<transform_rank_kernel>, s, x);
  launch(stream, by_tile, kTransformBlock, kernel<transform_collect_kernel>, s, x);
  launch(stream, by_warp, kTransformBlock, kernel<transform_refine_kernel>, s);
  launch(stream, by_warp, kTransformBlock, kernel<transform_count_kernel>, s);
  // Without a tile in shared memory, twice as many blocks fit a multiprocessor.
  const dim3 emitting = grid_of(grid_for(s.t.tiles, 2 * kTransformBlocks));
  launch(stream, emitting, kTransformBlock, kernel<transform_emit_kernel>, s, bitmap, values);
  return 0;
}

int64_t transform_decode(void* workspace, const TransformPart* parts, int64_t count, uint32_t code, float weight,
                         bool add, float* out, int64_t n, int32_t* failed, cudaStream_t stream) {
  const TransformLayout t = layout_of(code, n);
  if (count > kMostParts) throw std::invalid_argument("transform_decode: more than 16 parts");
  Arena arena(workspace);
  auto* counts = arena.take<uint32_t>(count * t.tiles);
  auto* offsets = arena.take<int64_t>(count * (t.tiles + 1));
  auto* formats = arena.take<RangeFloat>(count);
  auto* invalid = arena.take<int32_t>(1);
  if (!workspace) return arena.nbytes();
  TransformParts table{};
  table.count = int(count);
  for (int64_t c = 0; c < count; ++c) table.of[c] = parts[c];
  clear(invalid, sizeof *invalid, stream);
  if (count > 0) {
    launch(stream, warp_grid(count * t.tiles, kBlock), kBlock, kernel<transform_parts_count_kernel>, t, table, counts);
    launch(stream, grid_of(unsigned(count)), kScanBlock, kernel<transform_parts_scan_kernel>, t, table, counts, offsets,
           formats, invalid);
  }
  launch(stream, tile_grid(t), kTransformBlock, kernel<transform_decode_kernel>, t, table, offsets, formats, invalid,
         weight, add, out, failed);
  return 0;
}

}  // namespace gradzip::cuda
