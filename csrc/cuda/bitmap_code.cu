#include "cuda/bitmap_code.cuh"

#include "cuda/launch.h"
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

  dim3 grid() const { return grid_of(grid_for(ceil_div(count, kBlock))); }

  void scan(cudaStream_t stream) const {
    launch(stream, grid_of(1), kScanBlock, scan_counts_kernel, sizes, count, offsets, total);
  }
};

}  // namespace

int64_t bitmap_code_encode(void* workspace, const uint8_t* bitmap, int64_t n, int segment, uint8_t* out,
                           int64_t* nbytes, cudaStream_t stream) {
  Arena arena(workspace);
  const BitmapSegments segments(arena, n, segment);
  auto* entries = arena.take<uint16_t>(segments.count);
  if (!workspace) return arena.nbytes();
  launch(stream, segments.grid(), kBlock, bitmap_plan_kernel, bitmap, n, segment, segments.count, entries,
         segments.sizes);
  segments.scan(stream);
  launch(stream, segments.grid(), kBlock, bitmap_write_kernel, bitmap, n, segment, segments.count, entries,
         segments.offsets, out, nbytes);
  return 0;
}

int64_t bitmap_code_decode(void* workspace, const uint8_t* bytes, int64_t nbytes, int64_t n, int segment, int64_t count,
                           uint8_t* bitmap, int32_t* failed, cudaStream_t stream) {
  Arena arena(workspace);
  const BitmapSegments segments(arena, n, segment);
  auto* check = arena.take<BitmapCheck>(1);
  if (!workspace) return arena.nbytes();
  clear(check, sizeof *check, stream);
  launch(stream, segments.grid(), kBlock, bitmap_sizes_kernel, bytes, nbytes, n, segment, segments.count,
         segments.sizes, check);
  segments.scan(stream);
  launch(stream, segments.grid(), kBlock, bitmap_read_kernel, bytes, nbytes, n, segment, segments.count,
         segments.offsets, bitmap, check);
  launch(stream, grid_of(grid_for(ceil_div(n, 32 * kBlock))), kBlock, bitmap_check_kernel, check, n, count, bitmap,
         failed);
  return 0;
}

}  // namespace gradzip::cuda
