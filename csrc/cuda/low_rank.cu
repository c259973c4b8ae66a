#include "cuda/low_rank.cuh"

#include "cuda/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {
namespace {

constexpr int64_t kProjectBlocks = 1024;  // target number of blocks of a product whose output has fewer tiles
constexpr int64_t kLeastTiles = 2;        // least number of tiles per part

// How a product is cut into parts: by its size only, so that it has the same bits on every device.
struct Cut {
  int64_t tiles, parts;  // tiles of the output, parts of each tile

  Cut(int64_t outputs, int64_t length) : tiles(ceil_div(outputs, kLowRankTile)), parts(1) {
    const int64_t along = ceil_div(length, kLowRankTile) / kLeastTiles;
    if (tiles > 0) parts = ceil_div(kProjectBlocks, tiles);
    if (parts > along) parts = along;
    if (parts < 1) parts = 1;
  }
};

struct Partials {
  float* sums;
  uint32_t* tickets;

  Partials(Arena& arena, const Cut& cut, int64_t rank)
      : sums(arena.take<float>(cut.parts > 1 ? cut.tiles * cut.parts * kLowRankTile * rank : 0)),
        tickets(arena.take<uint32_t>(cut.parts > 1 ? cut.tiles : 0)) {}
};

int padded_rank(int64_t rank) {
  int padded = 1;
  while (padded < rank && padded < kLowRankMost) padded *= 2;
  return padded;
}

using ProjectKernel = void (*)(Gradient, Factor, int, float*, float*, uint32_t*);

template <bool kTranspose>
ProjectKernel project_kernel_for(int padded) {
  switch (padded) {
    case 1:
      return project_kernel<1, kTranspose>;
    case 2:
      return project_kernel<2, kTranspose>;
    case 4:
      return project_kernel<4, kTranspose>;
    case 8:
      return project_kernel<8, kTranspose>;
    case 16:
      return project_kernel<16, kTranspose>;
    case 32:
      return project_kernel<32, kTranspose>;
    default:
      return project_kernel<64, kTranspose>;
  }
}

bool aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

void expand(int64_t rows, int64_t columns, int64_t rank, const Product& first, const float* from, float* out,
            const Product& second, float* m, cudaStream_t stream) {
  const int64_t tiles = ceil_div(rows, kLowRankTile) * ceil_div(columns, kLowRankTile);
  if (tiles == 0) return;
  const bool wide = columns % 4 == 0 && aligned(from) && aligned(out) && aligned(m);
  launch(stream, grid_of(unsigned(tiles)), kBlock, expand_product_kernel, rows, columns, rank, first, from, out, second,
         m, wide);
}

}  // namespace

int64_t low_rank_project(void* workspace, const float* m, float* e, int64_t rows, int64_t columns, const float* q,
                         int64_t rank, bool transpose, float* out, cudaStream_t stream) {
  const Cut cut = transpose ? Cut(columns, rows) : Cut(rows, columns);
  if (cut.tiles == 0) return 0;
  Arena arena(workspace);
  const Partials partials(arena, cut, padded_rank(rank));
  if (!workspace) return arena.nbytes();
  Gradient x{m, e, rows, columns, columns % 4 == 0 && aligned(m) && aligned(e)};
  for (int64_t first = 0; first < rank; first += kLowRankMost) {
    const int64_t count = rank - first < kLowRankMost ? rank - first : kLowRankMost;
    const Factor factor{q, transpose ? rows : columns, rank, first, int(count)};
    const int padded = padded_rank(count);
    if (cut.parts > 1) clear(partials.tickets, cut.tiles * int64_t(sizeof(uint32_t)), stream);
    launch(stream, grid_of(unsigned(cut.tiles * cut.parts)), kBlock,
           transpose ? project_kernel_for<true>(padded) : project_kernel_for<false>(padded), x, factor, int(cut.parts),
           out, partials.sums, partials.tickets);
    if (e) x.m = e, x.e = nullptr;  // m has been added
  }
  return 0;
}

void low_rank_expand(const float* p, const float* q, int64_t rows, int64_t columns, int64_t rank, const float* from,
                     float* out, cudaStream_t stream) {
  expand(rows, columns, rank, {p, q}, from, out, {}, nullptr, stream);
}

void low_rank_apply_average(float* m, float* e, const float* sent_p, const float* sent_q, const float* p,
                            const float* q, int64_t rows, int64_t columns, int64_t rank, cudaStream_t stream) {
  expand(rows, columns, rank, {sent_p, sent_q}, m, e, {p, q}, m, stream);
}

}  // namespace gradzip::cuda
