#include "cuda/index_code.cuh"

#include "cuda/block/launch.h"
#include "cuda/block/table.h"
#include "cuda/ops.h"

namespace gradzip::cuda {
namespace {

void decode(const std::vector<IndexRead>& reads, cudaStream_t stream) {
  int64_t most = 0, pieces = 0;  // tiles; and pieces of work of a stream
  for (const IndexRead& read : reads) {
    const int64_t tiles = ceil_div(read.stream.numel, kTile);
    most = std::max(most, tiles);
    pieces = std::max({pieces, tiles, index_blocks(read.stream.count)});
  }
  for_each_batch<kIndexReads>(reads, [&](const auto& batch, unsigned some) {
    launch(stream, grid_of(grid_for_each(some, most), some), kBlock, kernel<index_count_kernel>, batch);
    launch(stream, grid_of(1, some), kScanBlock, kernel<index_scan_kernel>, batch);
    launch(stream, grid_of(grid_for_each(some, pieces), some), kBlock, kernel<index_code_decode_kernel>, batch);
  });
}

IndexRead read_of(Arena& arena, const IndexStream& stream, int32_t* corrupt) {
  const int64_t tiles = ceil_div(stream.numel, kTile);
  return {stream, arena.take<uint32_t>(tiles), arena.take<int64_t>(tiles + 1), corrupt};
}

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
  for (int64_t i = 0; i < count; ++i) reads.push_back(read_of(arena, table[i], failed));
  if (!workspace) return arena.nbytes();
  decode(reads, stream);
  return 0;
}

int64_t index_code_decode_add(void* workspace, const WeightedSum* table, int64_t count, const IndexTerm* terms,
                              int32_t* failed, cudaStream_t stream) {
  int64_t all = 0, blocks = 0;
  std::vector<WeightedSumEntry> entries;
  for (int64_t i = 0; i < count; ++i) {
    entries.push_back({table[i], all, blocks});
    all += table[i].terms;
    blocks += std::max<int64_t>(1, ceil_div(table[i].n, kSumTile));  // one at least, which reports a corrupt term
  }
  Arena arena(workspace);
  std::vector<IndexAdd> adds;
  for (int64_t t = 0; t < all; ++t)
    adds.push_back({arena.take<int32_t>(terms[t].count), terms[t].values, terms[t].count, terms[t].weight});
  // In one table, of sums, of terms, and of a flag for each sum, clear: as a rule, one upload for all.
  const size_t of_sums = entries.size() * (sizeof(WeightedSumEntry) / 8),
               of_terms = adds.size() * (sizeof(IndexAdd) / 8);
  std::vector<uint64_t> words(of_sums + of_terms + size_t(ceil_div(count, 2)));
  if (count) std::memcpy(words.data(), entries.data(), of_sums * 8);
  if (all) std::memcpy(words.data() + of_sums, adds.data(), of_terms * 8);
  uint64_t* const uploaded = upload(arena, words, stream);
  int32_t* const corrupt = uploaded ? reinterpret_cast<int32_t*>(uploaded + of_sums + of_terms) : nullptr;
  std::vector<IndexRead> reads;
  for (int64_t i = 0, t = 0; i < count; ++i)
    for (const int64_t end = t + table[i].terms; t < end; ++t)
      reads.push_back(read_of(arena,
                              {terms[t].stream, terms[t].nbytes, table[i].n, terms[t].count, adds[size_t(t)].indices},
                              corrupt ? corrupt + i : nullptr));
  if (!workspace) return arena.nbytes();
  decode(reads, stream);
  if (blocks > 0)
    launch(stream, grid_of(unsigned(blocks)), kBlock, kernel<index_add_kernel>,
           reinterpret_cast<const WeightedSumEntry*>(uploaded), count,
           reinterpret_cast<const IndexAdd*>(uploaded + of_sums), corrupt, failed);
  return 0;
}

}  // namespace gradzip::cuda
