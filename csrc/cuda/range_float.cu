#include "cuda/range_float.cuh"

#include "cuda/block/launch.h"
#include "cuda/block/table.h"
#include "cuda/ops.h"

namespace gradzip::cuda {

int64_t range_float_fit(void* workspace, const RangeFit* table, int64_t count, int bits, int mantissa, float vmin,
                        float vmax, cudaStream_t stream) {
  Arena arena(workspace);
  auto* states = arena.take<FitState>(count);
  if (!workspace) return arena.nbytes();
  clear(states, count * int64_t(sizeof *states), stream);
  std::vector<FitEntry> entries;
  int64_t most = 0, runs = 0;
  for (int64_t i = 0; i < count; ++i) {
    entries.push_back({table[i], states + i});
    most = std::max(most, table[i].n);
    runs = std::max(runs, ceil_div(table[i].n, histogram_step(table[i].n)));
  }
  for_each_batch(entries, [&](const Batch<FitEntry>& batch, unsigned some) {
    if (vmin > vmax)
      launch(stream, grid_of(grid_for_each(some, ceil_div(most, 16 * kBlock)), some), kBlock, kernel<range_kernel>,
             batch);
    if (mantissa < 0)
      launch(stream, grid_of(grid_for_each(some, runs, 1), some), kBlock, kernel<histogram_kernel>, batch);
    launch(stream, grid_of(1, some), kFitBlock, kernel<fit_kernel>, batch, bits, mantissa, vmin, vmax);
  });
  return 0;
}

void range_float_encode(const RangeFloat* format, const float* x, int64_t n, bool stochastic, uint64_t key,
                        int32_t* codes, int64_t* outside, cudaStream_t stream) {
  clear(outside, sizeof *outside, stream);
  launch(stream, grid_of(grid_for(ceil_div(n, 4 * kBlock))), kBlock,
         stochastic ? kernel<encode_kernel<true>> : kernel<encode_kernel<false>>, format, x, n, key, codes, outside);
}

void range_float_encode_packed(const RangeSource* table, int64_t count, int bits, bool stochastic,
                               const int64_t* replays, cudaStream_t stream) {
  int64_t most = 0;
  for (int64_t i = 0; i < count; ++i) most = std::max(most, table[i].n);
  for_each_batch(std::vector<RangeSource>(table, table + count), [&](const Batch<RangeSource>& batch, unsigned some) {
    launch(stream, grid_of(grid_for_each(some, ceil_div(most, kPackTile)), some), kBlock,
           stochastic ? kernel<encode_packed_kernel<true>> : kernel<encode_packed_kernel<false>>, batch, bits, replays);
  });
}

void range_float_decode(const RangeFloat* format, const int32_t* codes, int64_t n, float* x, int32_t* failed,
                        cudaStream_t stream) {
  launch(stream, grid_of(grid_for(ceil_div(n, kBlock))), kBlock, kernel<decode_kernel>, *format, codes, n, x, failed);
}

void range_float_decode_packed(const RangeCodes* table, int64_t count, int bits, int32_t* failed, cudaStream_t stream) {
  int64_t most = 0;
  for (int64_t i = 0; i < count; ++i) most = std::max(most, table[i].n);
  for_each_batch<kRangeCodes>(std::vector<RangeCodes>(table, table + count), [&](const auto& batch, unsigned some) {
    launch(stream, grid_of(grid_for_each(some, ceil_div(most, kBlock)), some), kBlock, kernel<decode_packed_kernel>,
           batch, bits, failed);
  });
}

}  // namespace gradzip::cuda
