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

template <class T>
struct Kind {
  using Tile = T;
};

// f(Kind<T>()) for the kind of tile T that kernels use for a transform: of the first row with this code, if there is one.
template <class Row, class... Rows, class F>
void with_tile_of(uint32_t code, F f) {
  if (code == Row::kCode)
    f(Kind<RowTile<Row>>());
  else if constexpr (sizeof...(Rows) > 0)
    with_tile_of<Rows...>(code, f);
  else
    f(Kind<Tile>());
}
// The blocks of FFTRange, 64 unless told otherwise; for DCTRange, no transform (matrices, 1x1 kernels) and common kernels.
template <class F>
void with_tile(uint32_t code, F f) {
  with_tile_of<FourierRow<8>, FourierRow<16>, FourierRow<32>, FourierRow<64>, DctRow<1, 1>, DctRow<3, 3>, DctRow<5, 5>,
               DctRow<7, 7>>(code, f);
}

template <class T = Tile>
dim3 tile_grid(const TransformLayout& t) {
  return grid_of(grid_for(t.tiles, T::kBlocks));
}
dim3 warp_grid(int64_t tiles, int block) { return grid_of(grid_for(ceil_div(tiles, block / kLanes), 2048 / block)); }

}  // namespace

void transform(const float* x, int64_t n, uint32_t code, float* coefficients, cudaStream_t stream) {
  const TransformLayout t = layout_of(code, n);
  launch(stream, tile_grid(t), Tile::kThreads, kernel<transform_kernel<Tile>>, t, x, coefficients);
}

void transform_inverse(const float* coefficients, int64_t n, uint32_t code, float* x, cudaStream_t stream) {
  const TransformLayout t = layout_of(code, n);
  launch(stream, tile_grid(t), Tile::kThreads, kernel<transform_inverse_kernel<Tile>>, t, coefficients, x);
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
  if (s.t.group == 2) abs_max(x, int(Dtype::float32), n, amax, stream);
  with_tile(code, [&](auto kind) {
    using T = typename decltype(kind)::Tile;
    launch(stream, tile_grid<T>(s.t), T::kThreads, kernel<transform_rank_kernel<T>>, s, x);
    launch(stream, tile_grid<T>(s.t), T::kThreads, kernel<transform_collect_kernel<T>>, s, x);
  });
  const dim3 by_warp = warp_grid(s.t.tiles, kTransformBlock);
  launch(stream, by_warp, kTransformBlock, kernel<transform_refine_kernel>, s);
  launch(stream, by_warp, kTransformBlock, kernel<transform_count_kernel>, s);
  const dim3 emitting = grid_of(grid_for(s.t.tiles, 2048 / kEmitBlock));
  launch(stream, emitting, kEmitBlock, kernel<transform_emit_kernel>, s, bitmap, values);
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
  with_tile(code, [&](auto kind) {
    using T = typename decltype(kind)::Tile;
    launch(stream, tile_grid<T>(t), T::kThreads, kernel<transform_decode_kernel<T>>, t, table, offsets, formats,
           invalid, weight, add, out, failed);
  });
  return 0;
}

}  // namespace gradzip::cuda
