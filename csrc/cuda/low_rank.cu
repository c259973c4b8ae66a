#include "cuda/low_rank.cuh"

#include "cuda/block/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {
namespace {

constexpr int64_t kProjectBlocks = 1024;  // target number of blocks of a product whose output has fewer tiles
constexpr int64_t kLeastTiles = 2;        // least number of tiles per part
constexpr int64_t kLaunchPartials = 1 << 22;  // floats of partial sums after which a launch takes no more matrices

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

int padded_rank(int64_t rank) {
  int padded = 1;
  while (padded < rank && padded < kLowRankMost) padded *= 2;
  return padded;
}

template <bool kTranspose, bool kHalf>
Kernel<ProjectTable> project_kernel_for(int padded) {
  switch (padded) {
    case 1:
      return kernel<project_kernel<1, kTranspose, kHalf>>;
    case 2:
      return kernel<project_kernel<2, kTranspose, kHalf>>;
    case 4:
      return kernel<project_kernel<4, kTranspose, kHalf>>;
    case 8:
      return kernel<project_kernel<8, kTranspose, kHalf>>;
    case 16:
      return kernel<project_kernel<16, kTranspose, kHalf>>;
    case 32:
      return kernel<project_kernel<32, kTranspose, kHalf>>;
    default:
      return kernel<project_kernel<64, kTranspose, kHalf>>;
  }
}

// To four elements, of any type.
bool aligned(const void* address, int64_t dtype = int64_t(Dtype::float32)) {
  return reinterpret_cast<uintptr_t>(address) % (Dtype(dtype) == Dtype::float32 ? 16 : 8) == 0;
}

// The products of one launch: from matrix `*at` on, the factors' columns from `first` on, all of one kernel. Matrices that
// take another kernel, or have no such columns, are left out.
struct ProjectLaunch {
  ProjectTable table{};
  int64_t blocks = 0, tickets = 0;
  uint32_t* first_ticket = nullptr;

  ProjectLaunch(const Projection* projections, int64_t count, int64_t first, int padded, bool transpose, bool half,
                int64_t* at, Arena& arena) {
    int64_t sums[kLowRankBatch], partials = 0;
    for (; *at < count && table.count < kLowRankBatch && partials < kLaunchPartials; ++*at) {
      const auto [m, dtype, e, rows, columns, q, rank, transposed, out] = projections[*at];
      const Cut cut = transpose ? Cut(columns, rows) : Cut(rows, columns);
      if (bool(transposed) != transpose || (Dtype(dtype) != Dtype::float32) != half) continue;
      if (rank <= first || padded_rank(rank - first) != padded || cut.tiles == 0) continue;
      const int64_t ranks = rank - first < kLowRankMost ? rank - first : kLowRankMost;
      const bool wide = columns % 4 == 0 && aligned(m, dtype) && aligned(e);
      // After the first columns, m has been added.
      const Gradient x{e && first > 0 ? e : m, first > 0 ? nullptr : e, rows, columns, int32_t(dtype), wide};
      sums[table.count] = cut.parts > 1 ? cut.tiles * cut.parts * kLowRankTile * padded : 0;
      partials += sums[table.count];
      table.entries[table.count++] = {x,
                                      {q, transpose ? rows : columns, int(rank), int(first), int(ranks)},
                                      out,
                                      nullptr,
                                      nullptr,
                                      uint32_t(cut.parts),
                                      uint32_t(blocks)};
      blocks += cut.tiles * cut.parts;
      if (cut.parts > 1) tickets += cut.tiles;
    }
    uint32_t* ticket = first_ticket = arena.take<uint32_t>(tickets);
    for (int i = 0; i < table.count; ++i) {
      ProjectEntry& entry = table.entries[i];
      entry.partial = arena.take<float>(sums[i]);
      entry.tickets = ticket;
      if (entry.parts > 1 && ticket) ticket += sums[i] / (int64_t(entry.parts) * kLowRankTile * padded);
    }
  }
};

// Launches `expand_product_kernel` for `count` matrices, where entry(i) is that of the i-th.
template <class Entry>
void expand(int64_t count, Entry&& entry, cudaStream_t stream) {
  for (int64_t at = 0; at < count;) {
    ExpandTable table{};
    int64_t blocks = 0;
    for (; at < count && table.count < kLowRankBatch; ++at) {
      ExpandEntry next = entry(at);
      const int64_t tiles = ceil_div(next.rows, kLowRankTile) * ceil_div(next.columns, kLowRankTile);
      if (tiles == 0) continue;
      next.wide = next.columns % 4 == 0 && aligned(next.from) && aligned(next.e) && aligned(next.out, next.dtype);
      next.first_block = uint32_t(blocks);
      table.entries[table.count++] = next;
      blocks += tiles;
    }
    if (table.count > 0) launch(stream, grid_of(unsigned(blocks)), kBlock, kernel<expand_product_kernel>, table);
  }
}

}  // namespace

int64_t low_rank_project(void* workspace, const Projection* table, int64_t count, cudaStream_t stream) {
  int64_t nbytes = 0, most = 0;
  for (int64_t i = 0; i < count; ++i) most = table[i].rank > most ? table[i].rank : most;
  for (int64_t first = 0; first < most; first += kLowRankMost)
    for (int padded = 1; padded <= kLowRankMost; padded *= 2)
      for (int kind = 0; kind < 4; ++kind)
        for (int64_t at = 0; at < count;) {
          const bool transpose = kind % 2, half = kind / 2;
          Arena arena(workspace);  // launches run one after the other, so they share the workspace
          const ProjectLaunch next(table, count, first, padded, transpose, half, &at, arena);
          if (next.table.count == 0) continue;
          nbytes = arena.nbytes() > nbytes ? arena.nbytes() : nbytes;
          if (!workspace) continue;
          if (next.tickets > 0) clear(next.first_ticket, next.tickets * int64_t(sizeof(uint32_t)), stream);
          const auto project = half ? transpose ? project_kernel_for<true, true> : project_kernel_for<false, true>
                               : transpose ? project_kernel_for<true, false>
                                           : project_kernel_for<false, false>;
          launch(stream, grid_of(unsigned(next.blocks)), kBlock, project(padded), next.table);
        }
  return workspace ? 0 : nbytes;
}

void low_rank_expand(const float* p, const float* q, int64_t rows, int64_t columns, int64_t rank, const float* from,
                     float* out, cudaStream_t stream) {
  float *e = from ? out : nullptr, *product = from ? nullptr : out;
  expand(
      1, [&](int64_t) { return ExpandEntry{rows, columns, rank, {p, q}, from, nullptr, e, {}, product, 0, 0, 0}; },
      stream);
}

void low_rank_apply_average(const AverageUpdate* table, int64_t count, cudaStream_t stream) {
  const auto entry = [&](int64_t i) {
    const AverageUpdate& a = table[i];
    const Product average{a.p, a.q};
    if (!a.e)
      return ExpandEntry{a.rows, a.columns, a.rank, average, nullptr, nullptr, nullptr, {}, a.out, a.dtype, 0, 0};
    const Product sent{a.sent_p, a.sent_q};
    return ExpandEntry{a.rows, a.columns, a.rank, sent, a.m, a.number, a.e, average, a.out, a.dtype, 0, 0};
  };
  expand(count, entry, stream);
}

}  // namespace gradzip::cuda
