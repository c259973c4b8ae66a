#include "cuda/spectrum.cuh"

#include "cuda/bitmap_tiles.h"
#include "cuda/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {

void spectrum_power(const float* spectrum, int64_t rows, int64_t length, const float* amax, float* power,
                    cudaStream_t stream) {
  const int64_t tiles = rows * ceil_div(length / 2 + 1, kRowTile);
  launch(stream, grid_of(grid_for(tiles)), kBlock, power_kernel, reinterpret_cast<const float2*>(spectrum), rows,
         length, amax, power);
}

int64_t spectrum_decode_add(void* workspace, const RangeFloat* format, const uint8_t* bitmap, const uint8_t* packed,
                            int64_t packed_bytes, int64_t count, float weight, float* spectrum, int64_t n,
                            int32_t* failed, cudaStream_t stream) {
  Arena arena(workspace);
  const BitmapOffsets tiles(arena, n);
  auto* total = arena.take<int64_t>(1);
  if (!workspace) return arena.nbytes();
  tiles.count(bitmap, n, total, stream);
  launch(stream, grid_of(tiles.grid()), kBlock, decode_add_kernel, format, bitmap, tiles.offsets, packed, packed_bytes,
         count, weight, spectrum, n, failed);
  return 0;
}

}  // namespace gradzip::cuda
