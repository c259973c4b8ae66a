#include "cuda/chunk_topk.cuh"

#include "cuda/block/launch.h"
#include "cuda/block/table.h"
#include "cuda/ops.h"

namespace gradzip::cuda {
namespace {

// Vectors of Ts.
template <class T>
void encode(const T*, const std::vector<ChunkSource>& table, int64_t chunk, float* most, cudaStream_t stream) {
  int64_t longest = 0;
  for (const ChunkSource& source : table) longest = std::max(longest, source.n);
  if (most) clear(most, int64_t(table.size() * sizeof *most), stream);
  for_each_batch<kChunkSources>(table, [&](const auto& batch, unsigned some) {
    launch(stream, grid_of(grid_for_each(some, ceil_div(longest, chunk)), some), kBlock, kernel<chunk_topk_kernel<T>>,
           batch, chunk, reinterpret_cast<uint32_t*>(most));
    if (most) most += some;
  });
}

}  // namespace

void chunk_topk(const ChunkSource* table, int64_t count, int dtype, int64_t chunk, float* most, cudaStream_t stream) {
  const void* const any = nullptr;
  typed(any, dtype, [&](auto* of) { encode(of, {table, table + count}, chunk, most, stream); });
}

void chunk_topk_values(const ChunkRecords* table, int64_t count, int64_t chunk, int32_t* failed, cudaStream_t stream) {
  int64_t most = 0;
  for (int64_t i = 0; i < count; ++i) most = std::max(most, chunks_count(table[i].n, chunk, table[i].k));
  for_each_batch<kChunkRecords>(std::vector<ChunkRecords>(table, table + count), [&](const auto& batch, unsigned some) {
    launch(stream, grid_of(grid_for_each(some, ceil_div(most, kBlock)), some), kBlock, kernel<chunk_topk_values_kernel>,
           batch, chunk, failed);
  });
}

}  // namespace gradzip::cuda
