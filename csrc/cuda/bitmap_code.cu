#include "cuda/bitmap_code.cuh"

#include "cuda/block/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {
namespace {

// The sizes and offsets of segments.
struct BitmapSegments {
  int64_t count;
  uint32_t* sizes;
  int64_t *offsets, *total;

  BitmapSegments(Arena& arena, int64_t n, int size)
      : count(ceil_div(n, size)),
        sizes(arena.take<uint32_t>(count)),
        offsets(arena.take<int64_t>(count + 1)),
        total(arena.take<int64_t>(1)) {}

  dim3 grid() const { return grid_of(grid_for(ceil_div(count * kLanes, kBlock))); }  // a warp for each

  void scan(cudaStream_t stream) const {
    launch(stream, grid_of(1), kScanBlock, kernel<scan_counts_kernel>, sizes, count, offsets, total);
  }
};

}  // namespace

int64_t bitmap_code_encode(void* workspace, const uint8_t* bitmap, int64_t n, int segment, uint8_t* out,
                           int64_t* nbytes, cudaStream_t stream) {
  Arena arena(workspace);
  const BitmapSegments segments(arena, n, segment);
  auto* entries = arena.take<uint16_t>(segments.count);
  if (!workspace) return arena.nbytes();
  launch(stream, segments.grid(), kBlock, kernel<bitmap_plan_kernel>, bitmap, n, segment, segments.count, entries,
         segments.sizes);
  segments.scan(stream);
  launch(stream, segments.grid(), kBlock, kernel<bitmap_write_kernel>, bitmap, n, segment, segments.count, entries,
         segments.offsets, out, nbytes);
  return 0;
}

int64_t bitmap_code_decode(void* workspace, const BitmapStream* streams, int64_t count, int64_t n, int segment,
                           bool exact, int32_t* failed, cudaStream_t stream) {
  const int64_t segments = ceil_div(n, segment), most = count < kMostStreams ? count : kMostStreams;
  Arena arena(workspace);
  auto* sizes = arena.take<uint32_t>(most * segments);
  auto* offsets = arena.take<int64_t>(most * (segments + 1));
  auto* checks = arena.take<BitmapCheck>(most);
  if (!workspace) return arena.nbytes();
  for (int64_t first = 0; first < count; first += kMostStreams) {
    const int64_t some = count - first < most ? count - first : most;
    BitmapStreams table{};
    for (int64_t i = 0; i < some; ++i) table.of[i] = streams[first + i];
    const auto grid = [&](int64_t work) { return grid_of(grid_for(ceil_div(work, kBlock)), unsigned(some)); };
    clear(checks, some * int64_t(sizeof *checks), stream);
    launch(stream, grid(segments), kBlock, kernel<bitmap_sizes_kernel>, table, n, segment, segments, sizes, checks);
    launch(stream, grid_of(unsigned(some)), kScanBlock, kernel<bitmap_scan_kernel>, sizes, segments, offsets);
    launch(stream, grid(segments * kLanes), kBlock, kernel<bitmap_read_kernel>, table, n, segment, segments, exact,
           offsets, checks);
    launch(stream, grid(ceil_div(n, 32)), kBlock, kernel<bitmap_check_kernel>, table, checks, n, int32_t(first),
           failed);
  }
  return 0;
}

}  // namespace gradzip::cuda
