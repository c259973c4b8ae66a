#include "cuda/bitmap_code.cuh"

#include "cuda/block/launch.h"
#include "cuda/block/table.h"
#include "cuda/ops.h"

namespace gradzip::cuda {
namespace {

BitmapSegments segments_of(Arena& arena, int64_t n, int64_t size) {
  const int64_t count = ceil_div(n, size);
  return {count, arena.take<uint32_t>(count), arena.take<int64_t>(count + 1)};
}

}  // namespace

int64_t bitmap_code_encode(void* workspace, const BitmapSource* table, int64_t count, cudaStream_t stream) {
  Arena arena(workspace);
  std::vector<BitmapPlan> plans;
  int64_t most = 0;  // segments of a bitmap
  for (int64_t i = 0; i < count; ++i) {
    const BitmapSegments segments = segments_of(arena, table[i].n, table[i].segment);
    plans.push_back({table[i], segments, arena.take<uint16_t>(segments.count)});
    most = std::max(most, segments.count);
  }
  if (!workspace) return arena.nbytes();
  for_each_batch(plans, [&](const Batch<BitmapPlan>& batch, unsigned some) {
    const dim3 grid = grid_of(grid_for_each(some, ceil_div(most * kLanes, kBlock)), some);  // a warp for each
    launch(stream, grid, kBlock, kernel<bitmap_plan_kernel>, batch);
    launch(stream, grid_of(1, some), kScanBlock, kernel<bitmap_scan_kernel<BitmapPlan>>, batch);
    launch(stream, grid, kBlock, kernel<bitmap_write_kernel>, batch);
  });
  return 0;
}

int64_t bitmap_code_decode(void* workspace, const BitmapStream* table, int64_t count, bool exact, int32_t* failed,
                           cudaStream_t stream) {
  Arena arena(workspace);
  auto* checks = arena.take<BitmapCheck>(count);
  std::vector<BitmapRead> reads;
  int64_t most = 0, longest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const BitmapSegments segments = segments_of(arena, table[i].n, table[i].segment);
    reads.push_back({table[i], segments, workspace ? checks + i : nullptr});
    most = std::max(most, segments.count);
    longest = std::max(longest, table[i].n);
  }
  if (!workspace) return arena.nbytes();
  if (count > 0) clear(checks, count * int64_t(sizeof *checks), stream);
  int32_t first = 0;
  for_each_batch(reads, [&](const Batch<BitmapRead>& batch, unsigned some) {
    const auto grid = [&](int64_t work) { return grid_of(grid_for_each(some, ceil_div(work, kBlock)), some); };
    launch(stream, grid(most), kBlock, kernel<bitmap_sizes_kernel>, batch);
    launch(stream, grid_of(1, some), kScanBlock, kernel<bitmap_scan_kernel<BitmapRead>>, batch);
    launch(stream, grid(most * kLanes), kBlock, kernel<bitmap_read_kernel>, batch, exact);
    launch(stream, grid(ceil_div(longest, 32)), kBlock, kernel<bitmap_check_kernel>, batch, first, failed);
    first += int32_t(some);
  });
  return 0;
}

}  // namespace gradzip::cuda
