#include "cuda/index_code.cuh"

#include "cuda/block/launch.h"
#include "cuda/block/table.h"
#include "cuda/ops.h"

namespace gradzip::cuda {
namespace {

constexpr int64_t kMostEntries = 65535;  // blocks along y

}  // namespace

int64_t index_code_encode(void* workspace, const IndexSource* table, int64_t count, cudaStream_t stream) {
  Arena arena(workspace);
  auto* states = arena.take<IndexPlanState>(count);
  std::vector<IndexPlan> plans;
  int64_t most = 0, pieces = 1;  // blocks of gaps; and pieces of work of a stream
  for (int64_t i = 0; i < count; ++i) {
    const int64_t blocks = index_blocks(table[i].count);
    plans.push_back({table[i], workspace ? states + i : nullptr, arena.take<uint32_t>(blocks),
                     arena.take<uint8_t>(blocks), arena.take<int64_t>(blocks + 1)});
    most = std::max(most, blocks);
    if (table[i].capacity > 0) pieces = std::max({pieces, blocks, ceil_div(table[i].numel, kTile)});
  }
  if (!workspace) return arena.nbytes();
  clear(states, count * int64_t(sizeof *states), stream);
  for_each_batch(plans, [&](const Batch<IndexPlan>& batch, unsigned some) {
    launch(stream, grid_of(grid_for_each(some, most), some), kBlock, kernel<index_plan_kernel>, batch);
    launch(stream, grid_of(grid_for_each(some, pieces), some), kBlock, kernel<index_write_kernel>, batch);
  });
  return 0;
}

int64_t index_code_decode(void* workspace, const IndexStream* table, int64_t count, int32_t* failed,
                          cudaStream_t stream) {
  Arena arena(workspace);
  std::vector<IndexRead> reads;
  int64_t most = 0, pieces = 0;  // tiles; and pieces of work of a stream
  for (int64_t i = 0; i < count; ++i) {
    const int64_t tiles = ceil_div(table[i].numel, kTile);
    reads.push_back({table[i], arena.take<uint32_t>(tiles), arena.take<int64_t>(tiles + 1)});
    most = std::max(most, tiles);
    pieces = std::max({pieces, tiles, index_blocks(table[i].count)});
  }
  if (!workspace) return arena.nbytes();
  for_each_batch(reads, [&](const Batch<IndexRead>& batch, unsigned some) {
    launch(stream, grid_of(grid_for_each(some, most), some), kBlock, kernel<index_count_kernel>, batch);
    launch(stream, grid_of(1, some), kScanBlock, kernel<index_scan_kernel>, batch);
    launch(stream, grid_of(grid_for_each(some, pieces), some), kBlock, kernel<index_code_decode_kernel>, batch, failed);
  });
  return 0;
}

int64_t index_code_decode_add(void* workspace, const WeightedSum* table, int64_t count, const IndexTerm* terms,
                              int32_t* failed, cudaStream_t stream) {
  // First the first term of each sum, then the second ones, and so on: terms are added in order, a launch for each
  // place, as several may add to the same element.
  std::vector<const IndexTerm*> of_sum;
  int64_t places = 0, longest = 1, pieces = 1, tiles = 0;
  for (int64_t i = 0; i < count; terms += table[i++].terms) {
    of_sum.push_back(terms);
    places = std::max(places, table[i].terms);
    longest = std::max(longest, table[i].n);
  }
  std::vector<IndexTermEntry> entries;
  std::vector<int64_t> ends;
  for (int64_t place = 0; place < places; ++place) {
    for (int64_t i = 0; i < count; ++i) {
      if (place >= table[i].terms) continue;
      const IndexTerm& term = of_sum[size_t(i)][place];
      entries.push_back({term, table[i], tiles, i, place == 0 && !table[i].add});
      tiles += ceil_div(table[i].n, kTile) + 1;
      pieces = std::max({pieces, ceil_div(table[i].n, kTile), index_blocks(term.count)});
    }
    ends.push_back(int64_t(entries.size()));
  }
  // Behind them a flag for each sum, clear: one upload for both.
  std::vector<uint64_t> words(reinterpret_cast<const uint64_t*>(entries.data()),
                              reinterpret_cast<const uint64_t*>(entries.data() + entries.size()));
  const size_t of_entries = words.size();
  words.resize(of_entries + size_t(ceil_div(count, 2)));
  Arena arena(workspace);
  uint64_t* uploaded = upload(arena, words, stream);
  auto* counts = arena.take<uint32_t>(tiles);
  auto* offsets = arena.take<int64_t>(tiles);
  if (!workspace) return arena.nbytes();
  const auto* on_device = reinterpret_cast<const IndexTermEntry*>(uploaded);
  auto* corrupt = reinterpret_cast<int32_t*>(uploaded + of_entries);
  for (int64_t i = 0; i < count; ++i)
    if (table[i].terms == 0 && !table[i].add) clear(table[i].out, table[i].n * int64_t(sizeof(float)), stream);
  if (entries.empty()) return 0;
  // queue(first entry, grid) for entries [begin, end), as many in a launch as a grid may have.
  const auto each = [&](int64_t begin, int64_t end, unsigned blocks, auto&& queue) {
    for (int64_t some; begin < end; begin += some) {
      some = std::min<int64_t>(end - begin, kMostEntries);
      queue(on_device + begin, grid_of(blocks, unsigned(some)));
    }
  };
  const int64_t all = ends.back();
  each(0, all, grid_for(pieces), [&](const IndexTermEntry* first, dim3 grid) {
    launch(stream, grid, kBlock, kernel<index_code_count_kernel>, first, counts);
  });
  each(0, all, 1, [&](const IndexTermEntry* first, dim3 grid) {
    launch(stream, grid, kScanBlock, kernel<index_code_scan_kernel>, first, counts, offsets);
  });
  for (size_t place = 0; place < ends.size(); ++place)
    each(place ? ends[place - 1] : 0, ends[place], grid_for(pieces), [&](const IndexTermEntry* first, dim3 grid) {
      launch(stream, grid, kBlock, kernel<index_code_decode_add_kernel>, first, offsets, corrupt);
    });
  each(0, ends[0], grid_for(ceil_div(longest, 16 * kBlock)), [&](const IndexTermEntry* first, dim3 grid) {
    launch(stream, grid, kBlock, kernel<index_code_spoil_kernel>, first, corrupt, failed);
  });
  return 0;
}

}  // namespace gradzip::cuda
