#include "cuda/transform.cuh"

#include "cuda/block/launch.h"
#include "cuda/block/table.h"
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

dim3 tile_grid(const TransformLayout& t) { return grid_of(grid_for(t.tiles, Tile::kBlocks)); }
// A warp for each tile of `count` vectors.
dim3 warp_grid(int64_t count, int64_t tiles, int block) {
  return grid_of(grid_for_each(count, ceil_div(tiles, block / kLanes), 2048 / block), unsigned(count));
}

}  // namespace

void transform(const float* x, int64_t n, uint32_t code, float* coefficients, cudaStream_t stream) {
  const TransformLayout t = layout_of(code, n);
  launch(stream, tile_grid(t), Tile::kThreads, kernel<transform_kernel<Tile>>, t, x, coefficients);
}

void transform_inverse(const float* coefficients, int64_t n, uint32_t code, float* x, cudaStream_t stream) {
  const TransformLayout t = layout_of(code, n);
  launch(stream, tile_grid(t), Tile::kThreads, kernel<transform_inverse_kernel<Tile>>, t, coefficients, x);
}

int64_t transform_select(void* workspace, const TransformSource* table, int64_t count, uint32_t code,
                         cudaStream_t stream) {
  Arena arena(workspace);
  auto* states = arena.take<TransformSelectState>(count);
  auto* amax = arena.take<float>(count);
  std::vector<TransformSelect> selects;
  std::vector<Matrix> columns;
  int64_t most = 1;  // tiles
  for (int64_t i = 0; i < count; ++i) {
    const auto [x, dtype, n, k, scratch, scratch_numel, bitmap, values] = table[i];
    const TransformLayout t = layout_of(code, n);
    const int64_t room = t.tiles * t.tile;
    auto* selection = arena.take<Selection>(1);
    auto* tiles = arena.take<SelectedTile>(t.tiles);
    auto* marks = arena.take<uint32_t>(room / t.group / 32);
    auto* candidates = scratch_numel >= room ? scratch : arena.take<float>(room);
    selects.push_back({t, x, dtype, k, bitmap, values, workspace ? amax + i : nullptr, workspace ? states + i : nullptr,
                       selection, tiles, marks, candidates});
    columns.push_back({static_cast<float*>(const_cast<void*>(x)), n, 1});
    most = std::max(most, t.tiles);
  }
  if (!workspace) return arena.nbytes();
  clear(states, count * int64_t(sizeof *states), stream);
  if (layout_of(code, 0).group == 2) abs_max_columns(columns.data(), count, int(table[0].dtype), amax, stream);
  for_each_batch(selects, [&](const Batch<TransformSelect>& batch, unsigned some) {
    with_tile(code, [&](auto kind) {
      using T = typename decltype(kind)::Tile;
      const dim3 grid = grid_of(grid_for_each(some, most, T::kBlocks), some);
      launch(stream, grid, T::kThreads, kernel<transform_rank_kernel<T>>, batch);
      launch(stream, grid, T::kThreads, kernel<transform_collect_kernel<T>>, batch);
    });
    const dim3 by_warp = warp_grid(some, most, kTransformBlock);
    launch(stream, by_warp, kTransformBlock, kernel<transform_refine_kernel>, batch);
    launch(stream, by_warp, kTransformBlock, kernel<transform_count_kernel>, batch);
    launch(stream, grid_of(grid_for_each(some, most, 2048 / kEmitBlock), some), kEmitBlock,
           kernel<transform_emit_kernel>, batch);
  });
  return 0;
}

int64_t transform_decode(void* workspace, const WeightedSum* table, int64_t count, const TransformPart* parts,
                         uint32_t code, float weight, int32_t* failed, cudaStream_t stream) {
  // Sums that share a launch, and the tiles of their parts, and one more of each.
  struct Some {
    TransformSums sums{};
    int32_t count = 0, parts = 0;
    int64_t tiles = 0, most = 1;
  };
  std::vector<Some> launches;
  int64_t first = 0, tiles = 0;
  for (int64_t i = 0; i < count; first += table[i++].terms) {
    if (table[i].terms > kMostParts) throw std::invalid_argument("transform_decode: more than 16 parts");
    const auto terms = int32_t(table[i].terms);
    if (launches.empty() || launches.back().parts + terms > kMostParts || launches.back().count == kMostParts)
      launches.emplace_back();
    Some& some = launches.back();
    const TransformLayout t = layout_of(code, table[i].n);
    for (int32_t c = 0; c < terms; ++c) {
      some.sums.of[some.parts + c] = parts[first + c];
      some.sums.sum_of[some.parts + c] = some.count;
    }
    some.sums.sums[some.count++] = {
        t, static_cast<float*>(table[i].out), some.tiles, some.parts, terms, int32_t(first), table[i].add != 0};
    some.parts += terms;
    some.tiles += terms * (t.tiles + 1);
    some.most = std::max(some.most, t.tiles);
    tiles = std::max(tiles, some.tiles);
  }
  Arena arena(workspace);
  const TransformScratch scratch{arena.take<uint32_t>(tiles), arena.take<int64_t>(tiles),
                                 arena.take<RangeFloat>(kMostParts), arena.take<int32_t>(kMostParts)};
  if (!workspace) return arena.nbytes();
  for (const Some& some : launches) {
    clear(scratch.invalid, some.count * int64_t(sizeof(int32_t)), stream);
    if (some.parts > 0) {
      launch(stream, warp_grid(some.parts, some.most, kBlock), kBlock, kernel<transform_parts_count_kernel>, some.sums,
             scratch);
      launch(stream, grid_of(unsigned(some.parts)), kScanBlock, kernel<transform_parts_scan_kernel>, some.sums,
             scratch);
    }
    with_tile(code, [&](auto kind) {
      using T = typename decltype(kind)::Tile;
      launch(stream, grid_of(grid_for_each(some.count, some.most, T::kBlocks), unsigned(some.count)), T::kThreads,
             kernel<transform_decode_kernel<T>>, some.sums, scratch, weight, failed);
    });
  }
  return 0;
}

}  // namespace gradzip::cuda
